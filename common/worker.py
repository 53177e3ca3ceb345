"""The one thread that owns the engine, and its door to asyncio.

```text
event loop                                engine thread
  submit ──> inbox (under a lock) ──────> add_request ─┐
  cancel ──> inbox ─────────────────────> cancel       ├─> step ─> step ─> …
  streams <── one call_soon_threadsafe per step <──────┘
```

The event loop never runs a forward pass, so it answers while one runs. An idle engine thread is blocked on a
condition, not polling.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence

from common.engine import Engine
from common.errors import EngineDeadError, QueueFullError, ShuttingDownError
from common.request import Request, StepOutput
from common.runner import fail

logger = logging.getLogger(__name__)

STOPPED = "the server was stopped"


class RequestStream:
    """One request's outputs as they come; iteration ends with the terminal one.

    Whoever stops reading early calls `cancel`.
    """

    def __init__(self, worker: EngineWorker, request: Request) -> None:
        self.request = request
        self._worker = worker
        self._outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StepOutput:
        if self._ended:
            raise StopAsyncIteration
        output = await self._outputs.get()
        self._ended = output.finished
        return output

    def put(self, output: StepOutput) -> None:
        self._outputs.put_nowait(output)

    def cancel(self) -> None:
        """Nobody reads any more: give up the request's place or memory. Harmless once it is done."""
        self._worker.cancel(self.request.request_id)


class Admission:
    """Places in the queue, promised to requests that are still being tokenized.

    A context manager: places that no request was submitted for are given back at its end.
    """

    def __init__(self, worker: EngineWorker, count: int) -> None:
        self._worker = worker
        self._count = count

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close_admission(self._count)
        self._count = 0

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Hand over as many requests as there are places: their streams, in order."""
        if len(requests) != self._count:
            raise ValueError(f"{self._count} places were promised, for {len(requests)} requests")
        self._count = 0
        return self._worker.submit(requests)


class EngineWorker:
    """Runs an engine in a thread of its own. Its methods belong to the event loop's thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakeup = threading.Condition()
        # Guarded by the condition's lock:
        self._arrived: deque[Request] = deque()
        self._cancelled: list[str] = []
        self._promised = 0  # places given out whose requests are not yet with the scheduler
        self._abort: Exception | None = None
        self._stopping = False
        # The event loop's own:
        self._streams: dict[str, RequestStream] = {}
        self._admissions = 0  # open: places promised, requests still to be handed over
        self._draining = False
        self._aborted: ShuttingDownError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def dead(self) -> EngineDeadError | None:
        """Why the engine ended; None while it lives."""
        return self.engine.dead

    @property
    def draining(self) -> bool:
        return self._draining

    def start(self) -> None:
        """Begin to run; call it on the event loop that will read the streams."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    # ------------------------------------------------------------------ requests (event loop)

    def admit(self, count: int = 1) -> Admission:
        """Promise places in the queue for `count` requests, all or none, before any work is done for them.

        Raises:
            QueueFullError: there is no room for so many.
            EngineDeadError, ShuttingDownError: nothing is taken any more.
        """
        if self.dead is not None:
            raise EngineDeadError(str(self.dead))
        if self._draining:
            raise ShuttingDownError("the server is shutting down")
        with self._wakeup:
            if self._queue_room() < count:
                raise QueueFullError("the server is at capacity; try again shortly")
            self._promised += count
        self._admissions += 1
        self._idle.clear()
        return Admission(self, count)

    def queue_room(self) -> int:
        """How many more requests would be admitted now."""
        with self._wakeup:
            return self._queue_room()

    def _queue_room(self) -> int:
        """Places neither taken nor promised. The lock is held."""
        return self.engine.scheduler.queue_room() - self._promised

    def close_admission(self, unused: int) -> None:
        """An admission is over (`Admission` calls this): take back the places that it did not use."""
        with self._wakeup:
            self._promised -= unused
        self._admissions -= 1
        self._mark_idle()

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Hand over requests whose places were promised (`Admission.submit` is the way to call this).

        Raises:
            ShuttingDownError: the time to drain is over, or the worker was stopped; nothing new begins.
        """
        if self._aborted is not None:
            with self._wakeup:
                self._promised -= len(requests)
            raise self._aborted
        streams = [RequestStream(self, request) for request in requests]
        self._streams |= {stream.request.request_id: stream for stream in streams}
        self._idle.clear()
        with self._wakeup:
            self._arrived.extend(requests)
            self._wakeup.notify()
        return streams

    def cancel(self, request_id: str) -> None:
        """End a request that nobody reads any more."""
        if self._streams.pop(request_id, None) is None:
            return
        self._mark_idle()
        with self._wakeup:
            self._cancelled.append(request_id)
            self._wakeup.notify()

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # cancelled meanwhile
                continue
            stream.put(output)
            if output.finished:
                del self._streams[output.request_id]
        self._mark_idle()

    def _mark_idle(self) -> None:
        if not self._streams and not self._admissions:
            self._idle.set()

    # ------------------------------------------------------------------ ending (event loop)

    def stop_admitting(self) -> None:
        """From now on `admit` refuses; what was accepted goes on."""
        self._draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every accepted request is answered. False: some were not in time, and have been failed."""
        self.stop_admitting()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            self._aborted = ShuttingDownError("the server was shut down before this request was finished")
            with self._wakeup:
                self._abort = self._aborted
                self._wakeup.notify()
            await self._idle.wait()
            return False
        return True

    async def stop(self) -> None:
        """End the thread after the step it is in. What is still unanswered is failed."""
        self.stop_admitting()
        self._aborted = ShuttingDownError(STOPPED)
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        await asyncio.to_thread(self._thread.join)

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        while True:
            with self._wakeup:
                self._wait_for_work()
                stopping = self._stopping
                if stopping:
                    self._abort = ShuttingDownError(STOPPED)
                outputs = self._take_in()
            if not stopping and self._is_due():
                outputs += self._step()
            if outputs:
                self._hand_back(outputs)
            if stopping:
                return

    def _wait_for_work(self) -> None:
        """Block until there is news or the engine has something to do. The lock is held, and let go meanwhile."""
        while not (self._arrived or self._cancelled or self._abort or self._stopping):
            wake = self.engine.next_wake()
            timeout = None if wake is None else wake - self.engine.clock()
            if timeout is not None and timeout <= 0:
                return
            self._wakeup.wait(timeout)

    def _is_due(self) -> bool:
        wake = self.engine.next_wake()
        return wake is not None and wake <= self.engine.clock()

    def _take_in(self) -> list[StepOutput]:
        """Carry the news to the engine; outputs of requests it did not take. The lock is held.

        A place stays promised until its request is in the scheduler's queue, so that none is counted twice
        and none is missed.
        """
        outputs: list[StepOutput] = []
        while self._arrived:
            request = self._arrived.popleft()
            try:
                if not self.engine.add_request(request):
                    raise QueueFullError("the server is at capacity; try again shortly")  # noqa: TRY301 - fails as others do
            except Exception as error:
                outputs.append(fail(request, error))
            self._promised -= 1
        for request_id in self._cancelled:
            self.engine.cancel(request_id)
        self._cancelled.clear()
        if self._abort is not None:
            outputs += self.engine.abort_all(self._abort)
            self._abort = None
        return outputs

    def _step(self) -> list[StepOutput]:
        try:
            return self.engine.step()
        except Exception as error:
            # Not a failed pass (the runner sees to those) but a mistake of ours: nothing is certain any more.
            logger.exception("the engine failed")
            self.engine.dead = EngineDeadError("the engine failed; restart the server")
            self.engine.dead.__cause__ = error
            return self.engine.abort_all(self.engine.dead)

    def _hand_back(self, outputs: list[StepOutput]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, outputs)
        except RuntimeError:  # the loop is closed: nobody is left to read
            logger.debug("outputs of a closed event loop were dropped")
