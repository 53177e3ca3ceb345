"""The thread that owns an engine.

```text
event loop (common.hosting.async_engine)                engine thread
                                          build the engine (in a thread that ends), warm up
  submit ──> inbox (under a lock) ──────> add_request ─┐
  cancel ──> inbox ─────────────────────> cancel       ├─> step ─> step ─> …
  streams <── one call_soon_threadsafe per step <──────┘
```

The event loop never runs a forward pass, so it stays responsive while one runs. An idle engine thread blocks on a
condition and does not poll.

**One thread computes.** libgomp, which runs a CPU's matrix products in parallel, keeps a pool of workers for every
thread that has called a parallel operator. With a second pool there are more workers than cores. libgomp then puts
them to sleep between the hundreds of parallel regions of a pass, and a decode step takes twice as long. So only one
thread of the process calls parallel operators. In phases 4 to 8 it is the engine's thread. From phase 9 on it is
the thread of the engine's stream, and the engine's thread makes small tensors only. The engine is built in a thread
that ends afterwards, and its pool of workers ends with it.

| thread | what runs there | module |
| --- | --- | --- |
| event loop | HTTP, routes, validation of small bodies, events of answers | `common.server` |
| `engine` | `Engine.step`: planning, commits, text; in phases 4 to 8 forward passes and sampling | here |
| a C++ thread, or `stream` | from phase 9 on, on a CPU: forward passes and sampling | `common.devices.streams` |
| lanes | large bodies, grammars, prompts, `/tokenize`, large answers | `common.server.api.lanes` |
| `masks`, a few | token masks of grammars | `common.constrained.mask_threads` |
| `apart` | one function: building the engine, recording a pass; then it ends | `common.devices.streams` |

On a GPU, the `engine` thread launches the kernels of all passes, in every phase. If the engine has a process of its
own, that process's main thread reads messages, and a thread `compiling` compiles grammars (`common.hosting.child`).

In a server, the engine's threads are in a process of their own by default (`common.hosting.process`). Then the
event loop's process turns tokens into text and finds stop strings.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

from common.engine.commit import fail
from common.engine.engine import Engine
from common.errors import EngineDeadError, QueueFullError, ShuttingDownError
from common.hosting.calls import EngineCalls
from common.observing.frames import Frame
from common.request import FinishReason, Request, StepOutput

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

STOPPED = "the server was stopped"

Deliver = Callable[[list[StepOutput]], None]


def queue_full(limit: int, count: int) -> QueueFullError:
    """Return the error that refuses `count` requests: a queue for at most `limit` requests has no room for them."""
    return QueueFullError(
        f"the queue, which holds {limit} requests (the server's option --max-waiting-requests), has no room for "
        f"{count} more; try again shortly"
    )


class EngineThread:
    """Builds an engine and runs it in a thread of its own. Any thread may call the methods, but `start` needs a
    running event loop.

    Args:
        make_engine: builds the engine, and may do so in another thread; called in the engine's thread.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._built: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakeup = threading.Condition()  # its lock is reentrant
        # Guarded by the condition's lock:
        self._arrived: deque[Request] = deque()
        self._cancelled: list[tuple[str, FinishReason]] = []
        self._calls: list[tuple[Callable[[EngineCalls], Any], Future[Any]]] = []  # to run between two steps
        self._abort: Exception | None = None
        self._stopping = False
        self._turn_began_s: float | None = None  # on the clock of `time.monotonic`; None: waits for work

    def build(self) -> Engine:
        """Start the thread and block until it has built its engine. Returns the engine. Raises as `engine`."""
        self._thread.start()
        return self.engine

    @property
    def engine(self) -> Engine:
        """The engine. Blocks until it is built. Raises any error of building it."""
        return self._built.result()

    @property
    def running(self) -> bool:
        """Whether the engine's thread is alive."""
        return self._thread.is_alive()

    @property
    def step_s(self) -> float:
        """Seconds since the thread began its present step; 0 while it waits for work."""
        began_s = self._turn_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def start(self, deliver: Deliver, publish: Callable[[Frame | None], None]) -> None:
        """From now on, call `deliver` with each step's outputs, and `publish` with frames of the live view, both on
        the calling thread's event loop. Builds the engine if `build` was not called."""
        self._loop, self._deliver, self._publish = asyncio.get_running_loop(), deliver, publish
        if self._thread.ident is None:
            self.build()

    # ------------------------------------------------------------------ the inbox

    def queue_room(self) -> int:
        """Return how many more requests the queue can take after those in the inbox."""
        with self._wakeup:
            return self.engine.scheduler.queue_room() - len(self._arrived)

    def num_waiting(self) -> int:
        """Return how many requests wait to be computed, including those in the inbox."""
        with self._wakeup:
            return self.engine.scheduler.num_waiting + len(self._arrived)

    def submit(self, requests: Sequence[Request]) -> None:
        """Pass requests to the engine before its next step."""
        with self._wakeup:
            self._arrived.extend(requests)
            self._wakeup.notify()

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """Cancel a request before the next step, which returns its terminal output."""
        with self._wakeup:
            self._cancelled.append((request_id, reason))
            self._wakeup.notify()

    def call(
        self, function: Callable[Concatenate[EngineCalls, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Call a method of `EngineCalls` in the engine's thread, between two steps. Returns a future of its result.

        Raises:
            ShuttingDownError: the thread is stopping.
        """
        outcome: Future[T] = Future()
        with self._wakeup:
            if self._stopping:
                raise ShuttingDownError(STOPPED)
            self._calls.append((lambda calls: function(calls, *args, **kwargs), outcome))
            self._wakeup.notify()
        return outcome

    def abort(self, error: Exception) -> None:
        """After the present step, fail every request with this error."""
        with self._wakeup:
            self._abort = error
            self._wakeup.notify()

    def stop(self) -> None:
        """End the thread after its present step."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()

    def join(self, timeout_s: float | None = None) -> None:
        """Block until the thread has ended, for at most `timeout_s` seconds."""
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            engine = self._make_engine()
            self._engine_calls = EngineCalls(engine, self._publish_frame)
            self._built.set_result(engine)
        except BaseException as error:  # `build` raises it
            self._built.set_exception(error)
            return
        while True:
            try:
                if self._turn():
                    self._engine_calls.close()
                    return
            except BaseException as error:
                # The runner handles failed passes. This is a bug, or an exception that ends threads: the engine's
                # state is unknown. The thread keeps running, to fail later requests with this error.
                if self.engine.dead is not None:
                    raise
                logger.exception("the engine failed")
                self.engine.dead = EngineDeadError("the engine failed; restart the server")
                self.engine.dead.__cause__ = error
                self._hand_back(self.engine.abort_all(self.engine.dead))

    def _turn(self) -> bool:
        """Wait for work, pass it to the engine, and run a step if due. Returns whether the thread is to end."""
        with self._wakeup:
            self._wait_for_work()
        self._turn_began_s = time.monotonic()
        try:
            if self.engine.is_due:
                self.engine.wait()  # requests that arrive during this wait are part of the step
            with self._wakeup:
                stopping = self._stopping
                refused = self._empty_inbox()
            self._hand_back(refused)  # before the step, which may be long
            if not stopping and self.engine.is_due:
                self._hand_back(self.engine.step())
        finally:
            self._turn_began_s = None
        return stopping

    def _wait_for_work(self) -> None:
        """Block until there is work. Call with the lock held; it is released while waiting."""
        while not (self._arrived or self._cancelled or self._calls or self._abort or self._stopping):
            wake = self.engine.next_wake()
            timeout = None if wake is None else wake - self.engine.clock()
            if timeout is not None and timeout <= 0:
                return
            self._wakeup.wait(timeout)

    def _empty_inbox(self) -> list[StepOutput]:
        """Pass new requests, cancellations, calls and an abort to the engine. Call with the lock held, so that each
        request is counted once.

        Returns:
            The terminal outputs of requests that the engine refused and, after an abort, the outputs that were not
            delivered before.
        """
        outputs: list[StepOutput] = []
        while self._arrived:
            request = self._arrived.popleft()
            try:
                if not self.engine.add_request(request):
                    raise queue_full(self.engine.config.max_waiting_requests, 1)  # noqa: TRY301 - fails as others do
            except Exception as error:
                outputs.append(fail(request, error))
        for request_id, reason in self._cancelled:
            self.engine.cancel(request_id, reason)
        self._cancelled.clear()
        for function, outcome in self._calls:
            if outcome.set_running_or_notify_cancel():  # its client may have left
                try:
                    outcome.set_result(function(self._engine_calls))
                except Exception as error:  # raised where the future is awaited
                    outcome.set_exception(error)
        self._calls.clear()
        if self._abort is not None:
            outputs += self.engine.abort_all(self._abort)
            self._abort = None
        return outputs

    def _hand_back(self, outputs: list[StepOutput]) -> None:
        if outputs:
            self._on_event_loop(self._deliver, outputs)

    def _publish_frame(self, frame: Frame | None) -> None:
        self._on_event_loop(self._publish, frame)

    def _on_event_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: no client is left to read
            logger.debug("what a closed event loop was to be told was dropped")
