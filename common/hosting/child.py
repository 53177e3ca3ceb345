"""The engine's process: one thread takes messages between two steps, and sends the outputs of each step.

```text
main thread   build the engine ─> messages ─> step ─> messages ─> step ─> …   an idle engine blocks until a message
compiling     compile the grammars of requests that are still to come
front         wait for the end of the server's process, and end this one
```

**One thread computes.** libgomp, which divides torch's large operators among a CPU's cores, keeps a pool of
workers for every thread that has called such an operator. With a second pool there are more workers than cores.
libgomp then puts them to sleep between the operators of a pass, and without native kernels, which have threads
of their own, a decode step takes twice as long. So only one thread of the process calls such operators. In
phases 4 to 8 it is the main thread. From phase 9 on it is the thread of the engine's stream, and the main
thread makes small tensors only. The engine is built in a thread that ends afterwards (`common.startup.build`),
and its pool of workers ends with it.

| thread | what runs there | module |
| --- | --- | --- |
| main | `Engine.step`: planning and commits; in phases 4 to 8 forward passes and sampling | here |
| a C++ thread, or `stream` | from phase 9 on, on a CPU: forward passes and sampling | `common.devices.streams` |
| `masks`, a few | token masks of grammars | `common.constrained.grammar` |
| `compiling`, a few | grammars | here |
| `apart` | one function: building the engine, recording a pass; then it ends | `common.devices.streams` |

On a GPU, the main thread launches the kernels of all passes, in every phase.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from common.constrained.grammar import Matcher
from common.engine.commit import fail
from common.engine.engine import Engine
from common.engine.scheduling import StepPlan
from common.engine.telemetry import StepRecord
from common.errors import EngineDeadError, QueueFullError, StartupError
from common.hosting.calls import EngineCalls
from common.hosting.messages import (
    Abort,
    Answered,
    Built,
    Call,
    Cancel,
    Compile,
    EngineState,
    NotBuilt,
    Planned,
    Shown,
    Stepped,
    Stop,
    Submit,
    ToEngine,
    picklable,
    receive,
    send,
)
from common.hosting.process import IGNORED_SIGNALS
from common.observing.frames import Frame
from common.request import Request, StepOutput
from common.startup.process_memory import freeze_objects

logger = logging.getLogger(__name__)


def serve(connection: Connection, make_engine: Callable[[], Engine], prepare: Callable[[], None]) -> NoReturn:
    """Build and run an engine for the process at the other end of a connection.

    The process is started with `IGNORED_SIGNALS` blocked.

    Args:
        connection: the connection.
        make_engine: builds the engine.
        prepare: called before `make_engine`, to set up the log.
    """
    for number in IGNORED_SIGNALS:  # not SIG_IGN, which the processes that this one starts would keep
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    threading.Thread(target=_end_with_front, name="front", daemon=True).start()
    code = 0
    try:
        prepare()
        with contextlib.suppress(EOFError, ConnectionError):
            engine = _build(connection, make_engine)
            if engine is not None:
                freeze_objects()
                EngineLoop(connection, engine).run()
    except Exception:
        logger.exception("the engine's process failed")
        code = 1
    logging.shutdown()
    os._exit(code)  # at once: a normal exit would wait for other threads, and stop some inside torch


def _end_with_front() -> None:
    """Wait for the end of the process that has started this one. Then end this one at once, even inside a step:
    nobody is left to read its outputs."""
    front = multiprocessing.parent_process()
    assert front is not None
    front.join()
    os._exit(0)


def _build(connection: Connection, make_engine: Callable[[], Engine]) -> Engine | None:
    """Return a new engine. If it cannot be built, send `NotBuilt` and return None."""
    try:
        return make_engine()
    except StartupError as error:
        send(connection, NotBuilt(error))
    except Exception as error:
        logger.exception("the engine could not be built")
        said = f"the engine could not be built: {type(error).__name__}: {error}"
        send(connection, NotBuilt(StartupError(said)))
    return None


class EngineLoop:
    """Runs an engine by the messages of a connection. All methods but `_answer` run in the engine's thread."""

    def __init__(self, connection: Connection, engine: Engine) -> None:
        self._connection = connection
        self._engine = engine
        self._arrivals = select.poll()  # `Connection.poll` makes a new one for each call
        self._arrivals.register(connection, select.POLLIN)
        self._sending = threading.Lock()
        self._calls = EngineCalls(engine, self._show)
        # A thread of the server's process waits for each grammar, so few are compiled at a time.
        self._compiling = ThreadPoolExecutor(thread_name_prefix="compiling")
        self._matchers: dict[int, Matcher] = {}  # by number: matchers for requests that are still to come
        self._taken = 0
        self._unsent: list[StepOutput] = []  # terminal outputs of requests that the engine refused
        self._sent = EngineState()
        self._step_is_known = False  # whether the server's process knows that a step runs
        self._stopping = False

    def run(self) -> None:
        """Run the engine until `Stop` comes. Raises EOFError or ConnectionError: the other end was closed."""
        self._engine.plan_watchers.append(self._planned)
        self._sent = self._state()
        self._send(Built(self._engine.maker.facts, self._sent))
        while not self._stopping:
            try:
                self._turn()
            except (EOFError, ConnectionError):
                raise
            except BaseException as error:
                # The runner handles failed passes. This is a bug, or an exception that ends threads: the engine's
                # state is unknown. The loop goes on, to fail later requests with this error.
                if self._engine.dead is not None:
                    raise
                logger.exception("the engine failed")
                self._engine.dead = EngineDeadError("the engine failed; restart the server")
                self._engine.dead.__cause__ = error
                self._report(self._engine.abort_all(self._engine.dead))
        self._compiling.shutdown(wait=False)
        self._calls.close()

    def _turn(self) -> None:
        """Wait for work, take the messages, and run a step if one is due."""
        engine = self._engine
        self._wait_for_work()
        if engine.is_due:
            engine.wait()  # requests that arrive during this wait are part of the step
        while self._arrivals.poll(0):
            self._take(receive(self._connection))
        if self._unsent:
            self._report([])  # before the step, which may be long
        if engine.is_due and not self._stopping:
            self._report(engine.step(), engine.telemetry.latest)
        else:
            self._report([])

    def _wait_for_work(self) -> None:
        """Block until a message has come, or the engine is due."""
        wake = self._engine.next_wake()
        left_s = None if wake is None else wake - self._engine.clock()
        if left_s is None or left_s > 0.0:
            self._arrivals.poll(None if left_s is None else left_s * 1000)

    # ------------------------------------------------------------------ messages

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit(requests):
                for arguments in requests:
                    self._add(arguments)
            case Cancel(request_id, reason):
                self._engine.cancel(request_id, reason)
            case Call(number, method, arguments):
                self._answer(number, functools.partial(method, self._calls, *arguments), with_state=True)
            case Compile():
                self._compile(message)
            case Abort(error):
                self._unsent += self._engine.abort_all(error)
            case Stop():
                self._stopping = True

    def _add(self, arguments: dict[str, Any]) -> None:
        self._taken += 1
        number = arguments["matcher"]
        request = Request(**arguments | {"matcher": None if number is None else self._matchers.pop(number)})
        try:
            if not self._engine.add_request(request):
                raise QueueFullError.of(self._engine.config.max_waiting_requests, 1)  # noqa: TRY301 - fails as others do
        except Exception as error:
            self._unsent.append(fail(request, error))

    def _compile(self, message: Compile) -> None:
        """Compile a grammar in another thread, and keep its matcher here."""
        for number in message.unused:
            self._matchers.pop(number, None)

        def make() -> float | None:
            grammars = self._engine.maker.grammars
            self._matchers[message.number] = grammars.compile(message.grammar)
            return grammars.compile_s(message.grammar)

        self._compiling.submit(self._answer, message.number, make, with_state=False)

    def _answer(self, number: int, function: Callable[[], object], *, with_state: bool) -> None:
        """Call a function, and send its result or its error. `with_state`: in the engine's thread only."""
        result, error = None, None
        try:
            result = function()
        except Exception as raised:  # it is raised where the result is awaited
            error = picklable(raised)
        self._send(Answered(number, result, error, self._state() if with_state else None))

    # ------------------------------------------------------------------ reports

    def _planned(self, plan: StepPlan) -> None:
        begun = [chunk.request.request_id for chunk in plan.prefill if chunk.is_first]
        if begun or not self._step_is_known:
            self._step_is_known = True
            self._sent = self._state()
            self._send(Planned(self._sent, time.monotonic(), begun))

    def _report(self, outputs: list[StepOutput], record: StepRecord | None = None) -> None:
        """Send outputs, with the record of the step that has made them. Sends nothing if nothing is new."""
        state = self._state()
        if self._unsent:
            outputs, self._unsent = self._unsent + outputs, []
        if not outputs and record is None and state == self._sent:
            return
        self._sent = state
        for place, output in enumerate(outputs):
            if output.error is not None:
                outputs[place] = dataclasses.replace(output, error=picklable(output.error))
        telemetry = self._engine.telemetry
        self._step_is_known = self._engine.is_due
        next_began_s = time.monotonic() if self._step_is_known else None
        self._send(Stepped(state, outputs, record, telemetry.counters, telemetry.accepted_at, next_began_s))

    def _show(self, frame: Frame | None) -> None:
        self._send(Shown(frame))

    def _state(self) -> EngineState:
        engine = self._engine
        scheduler = engine.scheduler
        return EngineState(
            self._taken, scheduler.num_waiting, scheduler.queue_room(), engine.paused, engine.dead
        )

    def _send(self, message: object) -> None:
        with self._sending, contextlib.suppress(OSError):  # the other process has ended
            send(self._connection, message)
