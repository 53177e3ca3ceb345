"""The one thread that owns the engine, and its door to asyncio.

```text
event loop                                engine thread
                                          build the engine: load, warm up
  submit ──> inbox (under a lock) ──────> add_request ─┐
  cancel ──> inbox ─────────────────────> cancel       ├─> step ─> step ─> …
  streams <── one call_soon_threadsafe per step <──────┘
```

The event loop never runs a forward pass, so it answers while one runs. An idle engine thread is blocked on a
condition, not polling.

**One thread computes.** libgomp, which shares out a CPU's matrix products, keeps a pool of workers for every
thread that has called an operator worth sharing out. With a second pool there are more workers than cores, and
libgomp then puts them to sleep between the hundreds of parallel regions of a pass: a decode step takes twice as
long. So one thread of the process calls such operators: the engine's in phases 4 to 8, that of the engine's stream
in phase 9, where the engine's own thread makes small tensors only. A thread that ends builds the engine, and takes
its pool of workers with it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from common.commit import fail
from common.engine import Engine
from common.errors import EngineDeadError, QueueFullError, ShuttingDownError
from common.request import Request, StepOutput
from common.telemetry import RequestTelemetry, RequestTimes

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOPPED = "the server was stopped"


class RequestStream:
    """One request's outputs as they come; iteration ends with the terminal one.

    Whoever stops reading early calls `cancel`.

    Attributes:
        received_tokens: how many have come, read or not.
        first_token_s: when the first came, on `time.monotonic`'s clock; None before.
        latest_token_s: when the latest came.
        longest_gap_s: the longest wait between two tokens.
        last: the terminal output; None before it has come.
    """

    def __init__(self, worker: EngineWorker, request: Request) -> None:
        self.request = request
        self._worker = worker
        self._outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._ended = False
        self._arrived_s = time.monotonic() if request.arrived_s is None else request.arrived_s
        self.received_tokens = 0
        self.first_token_s: float | None = None
        self.longest_gap_s = 0.0
        self.latest_token_s = 0.0
        self.last: StepOutput | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StepOutput:
        if self._ended:
            raise StopAsyncIteration
        output = await self._outputs.get()
        self._ended = output.finished
        return output

    def put(self, output: StepOutput) -> None:
        now, telemetry = time.monotonic(), self._worker.requests
        if output.token_id is not None:
            telemetry.generation_tokens += 1
            if self.first_token_s is None:
                self.first_token_s = now
                telemetry.time_to_first_token_s.observe(now - self._arrived_s)
            else:
                gap = now - self.latest_token_s
                self.longest_gap_s = max(self.longest_gap_s, gap)
                telemetry.inter_token_latency_s.observe(gap)
            self.latest_token_s = now
        self.received_tokens = output.completion_tokens
        if output.finished:
            self.last = output
            times = RequestTimes(
                self._arrived_s, self.request.scheduled_s, self.first_token_s, self.latest_token_s, now
            )
            telemetry.end(output, times)
        self._outputs.put_nowait(output)

    def put_error(self, error: Exception) -> None:
        """End the stream without the engine, which may be in the middle of a step."""
        self.put(
            StepOutput(
                request_id=self.request.request_id,
                token_id=None,
                text_delta="",
                finished=True,
                finish_reason=None,
                error=error,
                prompt_tokens=self.request.num_prompt_tokens,
                completion_tokens=self.received_tokens,
                cached_tokens=self.request.cached_tokens,
            )
        )

    def cancel(self) -> None:
        """Give up the request's place or memory; whoever still reads hears so. Harmless once it is done."""
        self._worker.cancel(self.request.request_id)


class HeldPlaces:
    """Places in the queue, held for requests that are still being tokenized.

    A context manager: places that no request was submitted for are given back at its end.
    """

    def __init__(self, worker: EngineWorker, count: int) -> None:
        self._worker = worker
        self._count = count

    def __enter__(self) -> HeldPlaces:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.give_back_places(self._count)
        self._count = 0

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Hand over as many requests as there are places: their streams, in order."""
        if len(requests) != self._count:
            raise ValueError(f"{self._count} places are held, for {len(requests)} requests")
        self._count = 0
        return self._worker.submit(requests)


class EngineWorker:
    """Builds an engine and runs it, in a thread of its own.

    `build` comes first; all other methods belong to the event loop's thread.

    Args:
        make_engine: called in the engine's thread.

    Attributes:
        requests: what became of those that were submitted.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self.requests = RequestTelemetry()
        self._built: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakeup = threading.Condition()
        # Guarded by the condition's lock:
        self._arrived: deque[Request] = deque()
        self._cancelled: list[str] = []
        self._calls: list[tuple[Callable[[Engine], Any], Future[Any]]] = []  # to be made between two steps
        self._held = 0  # places that are promised, and those of requests on their way to the scheduler
        self._abort: Exception | None = None
        self._stopping = False
        self._turn_began_s: float | None = None  # on `time.monotonic`'s clock; None: it waits for work
        # The event loop's own:
        self._streams: dict[str, RequestStream] = {}
        self._draining = False
        self._aborted: ShuttingDownError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def build(self) -> Engine:
        """Start the thread and wait until it has built its engine. Raises what building raises."""
        self._thread.start()
        return self._built.result()

    @property
    def engine(self) -> Engine:
        """The engine that was built."""
        return self._built.result()

    @property
    def dead(self) -> EngineDeadError | None:
        """Why the engine ended; None while it lives."""
        return self.engine.dead

    @property
    def step_s(self) -> float:
        """Seconds that the engine's thread has been in its present step; 0 while it waits for work. Any thread may
        ask."""
        began_s = self._turn_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    @property
    def draining(self) -> bool:
        return self._draining

    def start(self) -> None:
        """Take requests from now on; call it on the event loop that will read the streams."""
        self._loop = asyncio.get_running_loop()
        if self._thread.ident is None:
            self.build()

    # ------------------------------------------------------------------ requests (event loop)

    def hold_places(self, count: int = 1) -> HeldPlaces:
        """Hold places in the queue for `count` requests, all or none, before any work is done for them.

        Raises:
            QueueFullError: there is no room for so many.
            EngineDeadError, ShuttingDownError: nothing is taken any more.
        """
        self._refuse_at_the_end()
        with self._wakeup:
            self._check_room(count)
            self._held += count
        self._idle.clear()
        return HeldPlaces(self, count)

    def check_room(self, count: int) -> None:
        """Raise what `hold_places` would raise now, and hold nothing."""
        self._refuse_at_the_end()
        with self._wakeup:
            self._check_room(count)

    def _check_room(self, count: int) -> None:
        """Check that so many requests may be queued at once. The lock is held.

        Beside other requests, several at once must leave a quarter of the queue free: a client with 32 choices does
        not lock out those with one.

        Raises:
            QueueFullError: there are fewer places.
        """
        alone = not self._streams and not self._held
        kept = 0 if count == 1 or alone else self.engine.config.max_waiting_requests // 4
        if count > self._queue_room() - kept:
            raise self._queue_full(count)

    def _refuse_at_the_end(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(str(self.dead))
        if self._draining:
            raise ShuttingDownError("the server is shutting down")

    def queue_room(self) -> int:
        """How many more requests would be taken now."""
        with self._wakeup:
            return self._queue_room()

    def num_waiting(self) -> int:
        """How many requests wait to be computed, those included that are still being tokenized."""
        with self._wakeup:
            return self.engine.scheduler.num_waiting + self._held

    def _queue_room(self) -> int:
        """Places neither taken nor held. The lock is held."""
        return self.engine.scheduler.queue_room() - self._held

    def _queue_full(self, count: int) -> QueueFullError:
        return QueueFullError(
            f"the queue, which holds {self.engine.config.max_waiting_requests} requests "
            f"(the server's option --max-waiting-requests), has no room for {count} more; try again shortly"
        )

    def give_back_places(self, unused: int) -> None:
        """A holder of places is done (`HeldPlaces` calls this): take back those that it did not use."""
        with self._wakeup:
            self._held -= unused
        self._mark_idle()

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Hand over requests whose places are held (`HeldPlaces.submit` is the way to call this).

        Raises:
            ShuttingDownError: the time to drain is over, or the worker was stopped; nothing new begins.
        """
        if self._aborted is not None:
            with self._wakeup:
                self._held -= len(requests)
            raise self._aborted
        streams = [RequestStream(self, request) for request in requests]
        self._streams |= {stream.request.request_id: stream for stream in streams}
        self._idle.clear()
        with self._wakeup:
            self._arrived.extend(requests)
            self._wakeup.notify()
        return streams

    def cancel(self, request_id: str) -> None:
        """End a request: its stream's last output comes with the next step."""
        if request_id not in self._streams:
            return
        with self._wakeup:
            self._cancelled.append(request_id)
            self._wakeup.notify()

    async def reset_prefix_cache(self) -> int:
        """Between two steps, forget what is cached and used by nobody: how many blocks that were.

        Raises:
            EngineDeadError, ShuttingDownError: nothing is taken any more.
        """
        self._refuse_at_the_end()
        return await asyncio.wrap_future(self.call(lambda engine: engine.reset_prefix_cache()))

    async def pause(self) -> None:
        """Let the engine plan nothing more until `resume`, and wait until all outputs in flight are delivered.

        New requests queue meanwhile.

        Raises:
            EngineDeadError, ShuttingDownError: nothing is taken any more.
        """
        self._refuse_at_the_end()
        await asyncio.wrap_future(self.call(Engine.pause))
        while await asyncio.wrap_future(self.call(lambda engine: engine.runner.in_flight)):
            pass  # each of these calls waits for a step, and each step delivers one that is in flight
        self._refuse_at_the_end()

    async def resume(self) -> None:
        """Let the engine plan again. Raises as `pause` does."""
        self._refuse_at_the_end()
        await asyncio.wrap_future(self.call(Engine.resume))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Between two steps, in the engine's thread, call a function of the engine: soon, what it returns.

        Raises:
            ShuttingDownError: the thread is being ended.
        """
        outcome: Future[T] = Future()
        with self._wakeup:
            if self._stopping:
                raise ShuttingDownError(STOPPED)
            self._calls.append((function, outcome))
            self._wakeup.notify()
        return outcome

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # failed without waiting for the step
                continue
            stream.put(output)
            if output.finished:
                del self._streams[output.request_id]
        self._mark_idle()

    def _mark_idle(self) -> None:
        if not self._streams and not self._held:
            self._idle.set()

    # ------------------------------------------------------------------ ending (event loop)

    def stop_accepting(self) -> None:
        """From now on `hold_places` refuses; what was accepted goes on."""
        self._draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every accepted request is answered. False: some were not in time, and have been failed."""
        self.stop_accepting()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self._abort_all(ShuttingDownError("the server was shut down before this request was finished"))
            return False
        return True

    async def stop(self, timeout_s: float | None = None) -> None:
        """End the thread after the step it is in; what is still unanswered is failed at once.

        Args:
            timeout_s: how long to wait for that step; None: as long as it takes.
        """
        self.stop_accepting()
        with self._wakeup:
            self._stopping = True
        self._abort_all(ShuttingDownError(STOPPED))
        await asyncio.to_thread(self._thread.join, timeout_s)

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def _abort_all(self, error: ShuttingDownError) -> None:
        """Fail every stream now. The engine hears of it when its step ends, which may be long, or never."""
        self._aborted = error
        for stream in self._streams.values():
            stream.put_error(error)
        self._streams.clear()
        self._mark_idle()
        with self._wakeup:
            self._abort = error
            self._wakeup.notify()

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            self._built.set_result(self._make_engine())
        except BaseException as error:  # whoever waits for the engine raises it
            self._built.set_exception(error)
            return
        while True:
            try:
                if self._turn():
                    return
            except BaseException as error:
                # Not a failed pass (the runner sees to those) but a mistake of ours, or something that ends
                # threads: nothing is certain any more, and this thread stays to say so.
                if self.dead is not None:
                    raise
                logger.exception("the engine failed")
                self.engine.dead = EngineDeadError("the engine failed; restart the server")
                self.engine.dead.__cause__ = error
                self._hand_back(self.engine.abort_all(self.engine.dead))

    def _turn(self) -> bool:
        """Wait for work, take it in and compute a step; whether this was the last turn."""
        with self._wakeup:
            self._wait_for_work()
        self._turn_began_s = time.monotonic()
        try:
            if self.engine.is_due:
                self.engine.wait()  # who comes meanwhile is taken in for this step
            with self._wakeup:
                stopping = self._stopping
                refused = self._take_in()
            self._hand_back(refused)  # before the step, which may be long
            if not stopping and self.engine.is_due:
                self._hand_back(self.engine.step())
        finally:
            self._turn_began_s = None
        return stopping

    def _wait_for_work(self) -> None:
        """Block until there is news or the engine has something to do. The lock is held, and let go meanwhile."""
        while not (self._arrived or self._cancelled or self._calls or self._abort or self._stopping):
            wake = self.engine.next_wake()
            timeout = None if wake is None else wake - self.engine.clock()
            if timeout is not None and timeout <= 0:
                return
            self._wakeup.wait(timeout)

    def _take_in(self) -> list[StepOutput]:
        """Carry the news to the engine; outputs of requests it did not take. The lock is held.

        A place stays held until its request is in the scheduler's queue, so that none is counted twice and none
        is missed.
        """
        outputs: list[StepOutput] = []
        while self._arrived:
            request = self._arrived.popleft()
            try:
                if not self.engine.add_request(request):
                    raise self._queue_full(1)  # noqa: TRY301 - fails as others do
            except Exception as error:
                outputs.append(fail(request, error))
            self._held -= 1
        for request_id in self._cancelled:
            self.engine.cancel(request_id)
        self._cancelled.clear()
        for function, outcome in self._calls:
            if outcome.set_running_or_notify_cancel():  # its client may have left
                try:
                    outcome.set_result(function(self.engine))
                except Exception as error:  # whoever waits raises it
                    outcome.set_exception(error)
        self._calls.clear()
        if self._abort is not None:
            outputs += self.engine.abort_all(self._abort)
            self._abort = None
        return outputs

    def _hand_back(self, outputs: list[StepOutput]) -> None:
        if outputs:
            self.on_event_loop(self._deliver, outputs)

    def on_event_loop(self, call: Callable[[T], None], argument: T) -> None:
        """Make a call there, from the engine's thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, argument)
        except RuntimeError:  # the loop is closed: nobody is left to read
            logger.debug("what a closed event loop was to be told was dropped")
