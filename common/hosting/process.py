"""Starts the engine's process, exchanges messages with it, and notices its end.

```text
server's process                                              engine's process (`common.hosting.child`)
  event loop ─> send, ask ─> queue ─> thread `to engine` ───> connection ─> EngineLoop
  event loop <── a message at a time <─ thread `from engine` <─ connection <─┘
```

The event loop never waits for the connection: while the engine's process is stopped, it takes nothing.

If the engine's process ends, the questions that it has not answered fail. If the server's process ends, in whatever
way, the engine's ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from common.errors import EngineDeadError, ShuttingDownError, StartupError
from common.hosting.messages import Answered, Built, FromEngine, NotBuilt, Stop, ToEngine, receive, send

if TYPE_CHECKING:  # it imports torch, which the server's process does without
    from common.engine.engine import Engine

logger = logging.getLogger(__name__)

STOPPED = "the server was stopped"

SPAWN = multiprocessing.get_context("spawn")

#: The server's process gets these signals, too, and ends this process in good order.
IGNORED_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def _serve(
    connection: Connection, make_engine: Callable[[], Engine], prepare: Callable[[], None]
) -> NoReturn:
    """Run in the engine's process. Only this process imports torch."""
    from common.hosting.child import serve

    serve(connection, make_engine, prepare)


class EngineProcess:
    """An engine's process, and the connection to it.

    Call `build` first, then `start`. After `start`, call the methods in the event loop's thread only, except for
    `join`.

    Args:
        make_engine: builds the engine. It is pickled: a function of a module, or a `functools.partial` of one.
        prepare: called in the new process before `make_engine`, to set up its log.
    """

    def __init__(self, make_engine: Callable[[], Engine], prepare: Callable[[], None]) -> None:
        self._work = make_engine, prepare
        self._process: BaseProcess | None = None
        self._reader: threading.Thread | None = None
        self._unsent: SimpleQueue[ToEngine] = SimpleQueue()
        # By number, oldest first: the time of a question on the clock of `time.monotonic`, and the answer to come.
        self._questions: dict[int, tuple[float, Future[Any]]] = {}
        self._numbers = itertools.count()
        self._stopping = False
        self._ended: EngineDeadError | None = None

    def build(self) -> Built:
        """Start the process and block until it has built its engine.

        Raises:
            StartupError: the engine cannot be built, or its process has ended.
        """
        self._process, self._connection = self._launch()
        try:
            built: Built | NotBuilt = receive(self._connection)
        except (EOFError, OSError):
            raise StartupError(f"the engine's process {self._ending()} before the engine was built") from None
        if isinstance(built, NotBuilt):
            raise built.error
        return built

    def _launch(self) -> tuple[BaseProcess, Connection]:
        """Start the process. Returns it, and this process's end of the connection."""
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=_serve, args=(theirs, *self._work), name="engine", daemon=True)
        # A new process has its parent's blocked signals. So a terminal's Ctrl-C does not end it before it handles
        # signals itself. A tracker that `start` would start unblocks them, so it is started before.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()  # else the connection stays open if the process ends
        Finalize(None, process.kill, exitpriority=0)  # else `multiprocessing` waits for its end at exit
        return process, ours

    def start(
        self, take: Callable[[FromEngine], None], process_ended: Callable[[EngineDeadError], None]
    ) -> None:
        """From now on, call `take` with each message but answers, on the calling thread's event loop. Call
        `process_ended` if the process ends without `stop`, before its open questions fail."""
        self._loop, self._take, self._process_ended = asyncio.get_running_loop(), take, process_ended
        threading.Thread(target=self._write, name="to engine", daemon=True).start()
        self._reader = threading.Thread(target=self._read, name="from engine", daemon=True)
        self._reader.start()

    # ------------------------------------------------------------------ messages

    def send(self, message: ToEngine) -> None:
        """Send a message after those before it. May be called before `start`."""
        self._unsent.put(message)

    def ask(self, message: Callable[[int], ToEngine]) -> tuple[int, Future[Any]]:
        """Send a message that the process answers. Returns its number, and a future of the result.

        The future fails with an EngineDeadError if the process ends, and with a ShuttingDownError after `stop`.

        Args:
            message: returns the message, given its number.
        """
        number, outcome = next(self._numbers), Future[Any]()
        if self._ended is not None or self._stopping:
            outcome.set_exception(self._ended or ShuttingDownError(STOPPED))
        else:
            self._questions[number] = time.monotonic(), outcome
            self.send(message(number))
        return number, outcome

    @property
    def asked_s(self) -> float | None:
        """When the oldest open question was asked, on the clock of `time.monotonic`; None: there is none."""
        return next((asked_s for asked_s, _ in self._questions.values()), None)

    def _write(self) -> None:
        """Write messages to the connection, until `Stop` was written or the process has ended. Runs in a thread."""
        message: ToEngine | None = None
        with contextlib.suppress(OSError):
            while not isinstance(message, Stop):
                message = self._unsent.get()
                send(self._connection, message)

    def _read(self) -> None:
        """Pass each message to the event loop, until the process has ended. Runs in a thread."""
        assert self._process is not None
        with contextlib.suppress(EOFError, OSError, RuntimeError):  # the last: the event loop is closed
            while True:
                message = self._connection.recv_bytes()
                self._loop.call_soon_threadsafe(self._receive, message)
        self._process.join()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _receive(self, pickled: bytes) -> None:
        try:
            message: FromEngine = pickle.loads(pickled)
            if isinstance(message, Answered):
                if message.state is not None:
                    self._take(message)
                self._settle(message.number, message.result, message.error)
            else:
                self._take(message)
        except Exception:  # a bug: the engine's outputs can no longer be followed
            assert self._process is not None
            logger.exception("a message of the engine's process failed")
            self._process.kill()

    def _settle(self, number: int, result: object, error: Exception | None) -> None:
        _, outcome = self._questions.pop(number)
        if not outcome.set_running_or_notify_cancel():  # its client has left
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    # ------------------------------------------------------------------ the end

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.is_alive()

    def stop(self) -> None:
        """Have the process end after its present step."""
        self._stopping = True
        self.send(Stop())

    def join(self, timeout_s: float | None = None) -> None:
        """Block until the process has ended. Kill it after `timeout_s` seconds.

        A process that was stopped, or hangs in a driver, does not see its parent's end, and would keep its memory.
        """
        if self._process is None:
            return
        # Once it runs, the reader waits for the process. If two threads do so, one may not learn of the end.
        last = self._process if self._reader is None else self._reader
        last.join(timeout_s)
        if last.is_alive():
            logger.warning("the engine's process did not end within %g s, and was killed", timeout_s)
            self._process.kill()
            last.join(1.0)

    def _end(self) -> None:
        if self._stopping:
            return
        self._ended = EngineDeadError(f"the engine's process {self._ending()}; restart the server")
        logger.error(self._ended)
        self._process_ended(self._ended)
        for number in list(self._questions):
            self._settle(number, None, self._ended)

    def _ending(self) -> str:
        """Block until the process has ended. Returns how it ended, as words for a message."""
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
