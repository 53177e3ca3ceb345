"""The thread that owns the engine, and its interface to asyncio.

```text
event loop                                engine thread
                                          build the engine (in a thread that ends), warm up
  submit ──> inbox (under a lock) ──────> add_request ─┐
  cancel ──> inbox ─────────────────────> cancel       ├─> step ─> step ─> …
  streams <── one call_soon_threadsafe per step <──────┘
```

The event loop never runs a forward pass, so it stays responsive while one runs. An idle engine thread blocks on a
condition and does not poll.

**One thread computes.** libgomp, which runs a CPU's matrix products in parallel, keeps a pool of workers for every
thread that has called a parallel operator. With a second pool there are more workers than cores. libgomp then puts
them to sleep between the hundreds of parallel regions of a pass, and a decode step takes twice as long. So one
thread of the process calls such operators. In phases 4 to 8 it is the engine's thread. In phase 9 it is the thread
of the engine's stream, and the engine's thread makes small tensors only. The engine is built in a thread that ends
afterwards, and its pool of workers ends with it.

| thread | what runs there | module |
| --- | --- | --- |
| event loop | HTTP, routes, validation of small bodies, events of answers | `common.server` |
| `engine` | `Engine.step`: planning, commits, text; in phases 4 to 8 forward passes and sampling | here |
| a C++ thread, or `stream` | phase 9 on a CPU: forward passes and sampling | `common.streams` |
| lanes | large bodies, grammars, prompts, `/tokenize`, large answers | `common.server.intake` |
| `masks`, up to four | token masks of grammars | `common.mask_threads` |
| `apart` | one function: building the engine, recording a pass; the thread ends with it | `common.streams` |

On a GPU, the `engine` thread launches the kernels of all passes, in every phase.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from common.commit import fail, terminal_output
from common.engine import Engine
from common.errors import EngineDeadError, QueueFullError, ShuttingDownError
from common.request import Request, StepOutput
from common.telemetry import RequestTelemetry, RequestTimes

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOPPED = "the server was stopped"


class WakeUp:
    """Wakes the one task that waits. Cheaper than an `asyncio.Event`, which can wake any number of tasks."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the task, if one waits."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        """Return a future for the task to await, after it has found nothing to do."""
        self._waiting = asyncio.get_running_loop().create_future()
        return self._waiting


class RequestStream:
    """Iterates over one request's outputs as they arrive. Ends after the terminal output.

    A reader that stops early must call `cancel`.

    Attributes:
        received_tokens: number of tokens that have arrived, read or not.
        first_token_s: when the first token arrived, on the clock of `time.monotonic`; None before.
        latest_token_s: when the latest token arrived.
        longest_gap_s: the longest time between two tokens, in seconds.
        last: the terminal output; None before it has arrived.
    """

    def __init__(self, worker: EngineWorker, request: Request) -> None:
        self.request = request
        self._worker = worker
        self._outputs: deque[StepOutput] = deque()
        self._news = WakeUp()
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
        if not self._outputs:
            await self._news.wait()
        output = self._outputs.popleft()
        self._ended = output.finished
        return output

    def put(self, output: StepOutput) -> None:
        """Queue an output for the reader, and count it in the telemetry."""
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
        self._outputs.append(output)
        self._news.set()

    def put_error(self, error: Exception) -> None:
        """End the stream with an error at once, without the engine, which may be in the middle of a step."""
        ended = terminal_output(self.request)
        self.put(
            dataclasses.replace(
                ended, finish_reason=None, error=error, completion_tokens=self.received_tokens
            )
        )

    def cancel(self) -> None:
        """Cancel the request and free its place or memory. A reader gets its terminal output. No effect if done."""
        self._worker.cancel(self.request.request_id)


class HeldPlaces:
    """Context manager: holds places in the queue for requests that are still being tokenized.

    On exit, places for which no request was submitted are released.
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
        """Submit as many requests as places are held. Returns their streams, in order."""
        if len(requests) != self._count:
            raise ValueError(f"{self._count} places are held, for {len(requests)} requests")
        streams = self._worker.submit(requests)
        self._count = 0
        return streams


class EngineWorker:
    """Builds an engine and runs it in a thread of its own.

    Call `build` first. Call all other methods in the event loop's thread, unless they say otherwise.

    Args:
        make_engine: builds the engine; called in the engine's thread.

    Attributes:
        requests: telemetry of the submitted requests.
        draining: whether new requests are refused, because the server ends.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self.requests = RequestTelemetry()
        self._built: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakeup = threading.Condition()  # its lock is reentrant
        # Guarded by the condition's lock:
        self._arrived: deque[Request] = deque()
        self._cancelled: list[str] = []
        self._calls: list[tuple[Callable[[Engine], Any], Future[Any]]] = []  # to run between two steps
        self._held = 0  # promised places, and those of requests that are not yet in the scheduler's queue
        self._abort: Exception | None = None
        self._stopping = False
        self._turn_began_s: float | None = None  # on the clock of `time.monotonic`; None: waits for work
        # Used by the event loop's thread only:
        self._streams: dict[str, RequestStream] = {}
        self.draining = False
        self._aborted: ShuttingDownError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def build(self) -> Engine:
        """Start the thread and block until it has built its engine. Raises any error of building it."""
        self._thread.start()
        return self._built.result()

    @property
    def engine(self) -> Engine:
        """The engine. Blocks until it is built."""
        return self._built.result()

    @property
    def dead(self) -> EngineDeadError | None:
        """The error that ended the engine; None while it runs."""
        return self.engine.dead

    @property
    def step_s(self) -> float:
        """Seconds since the engine's thread began its present step; 0 while the thread waits for work. Any thread
        may read this."""
        began_s = self._turn_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def start(self) -> None:
        """Start accepting requests. Call it on the event loop that will read the streams."""
        self._loop = asyncio.get_running_loop()
        if self._thread.ident is None:
            self.build()

    # ------------------------------------------------------------------ requests (event loop)

    def hold_places(self, count: int = 1) -> HeldPlaces:
        """Hold places in the queue for `count` requests, all or none, before they are tokenized.

        Raises:
            QueueFullError: fewer places are free.
            EngineDeadError, ShuttingDownError: no requests are accepted any more.
        """
        with self._wakeup:
            self.check_room(count)
            self._held += count
        self._idle.clear()
        return HeldPlaces(self, count)

    def check_room(self, count: int) -> None:
        """Check that `count` requests may be queued at once.

        If other requests are in the server, several requests at once must leave a quarter of the queue free: a
        client with 32 choices must not lock out clients with one.

        Raises: as `hold_places`.
        """
        self._check_accepting()
        with self._wakeup:
            alone = not self._streams and not self._held
            kept = 0 if count == 1 or alone else self.engine.config.max_waiting_requests // 4
            if count > self.queue_room() - kept:
                raise self._queue_full(count)

    def _check_accepting(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(str(self.dead))
        if self.draining:
            raise ShuttingDownError("the server is shutting down")

    def queue_room(self) -> int:
        """Return how many more requests the queue can take now: places that are neither taken nor held."""
        with self._wakeup:
            return self.engine.scheduler.queue_room() - self._held

    def num_waiting(self) -> int:
        """Return how many requests wait to be computed, including those that are still being tokenized."""
        with self._wakeup:
            return self.engine.scheduler.num_waiting + self._held

    def _queue_full(self, count: int) -> QueueFullError:
        return QueueFullError(
            f"the queue, which holds {self.engine.config.max_waiting_requests} requests "
            f"(the server's option --max-waiting-requests), has no room for {count} more; try again shortly"
        )

    def give_back_places(self, unused: int) -> None:
        """Release the unused places of a `HeldPlaces` that ends. Only `HeldPlaces` calls this."""
        with self._wakeup:
            self._held -= unused
        self._mark_idle()

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Submit requests whose places are held. Call it through `HeldPlaces.submit`. Returns their streams.

        Raises:
            ShuttingDownError: the time to drain is over, or the worker was stopped.
        """
        if self._aborted is not None:
            raise self._aborted
        streams = [RequestStream(self, request) for request in requests]
        self._streams |= {stream.request.request_id: stream for stream in streams}
        self._idle.clear()
        with self._wakeup:
            self._arrived.extend(requests)
            self._wakeup.notify()
        return streams

    def cancel(self, request_id: str) -> None:
        """Cancel a request. Its stream gets the terminal output after the next step."""
        if request_id not in self._streams:
            return
        with self._wakeup:
            self._cancelled.append(request_id)
            self._wakeup.notify()

    async def reset_prefix_cache(self) -> int:
        """Free the unused cached blocks between two steps. Returns their number.

        Raises:
            EngineDeadError, ShuttingDownError: no requests are accepted any more.
        """
        self._check_accepting()
        return await asyncio.wrap_future(self.call(lambda engine: engine.reset_prefix_cache()))

    async def pause(self) -> None:
        """Pause the engine until `resume`, and wait until all outputs in flight are delivered.

        New requests queue during the pause.

        Raises:
            EngineDeadError, ShuttingDownError: no requests are accepted any more.
        """
        self._check_accepting()
        await asyncio.wrap_future(self.call(Engine.pause))
        while await asyncio.wrap_future(self.call(lambda engine: engine.runner.in_flight)):
            pass  # each call waits for a step, and each step delivers a step in flight
        self._check_accepting()

    async def resume(self) -> None:
        """Let the engine plan steps again. Raises as `pause` does."""
        self._check_accepting()
        await asyncio.wrap_future(self.call(Engine.resume))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function(engine)` on the engine's thread between two steps. Returns a future of its result.

        Raises:
            ShuttingDownError: the engine's thread is stopping.
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
            if stream is None:  # `_abort_all` has ended the stream
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
        """Let `hold_places` refuse new requests. Accepted requests go on."""
        self.draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait until every accepted one is answered.

        After `timeout_s`, fail those that are not answered, and return False.
        """
        self.stop_accepting()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self._abort_all(ShuttingDownError("the server was shut down before this request was finished"))
            return False
        return True

    async def stop(self, timeout_s: float | None = None) -> None:
        """Fail the unanswered requests at once, and end the thread after its present step.

        Args:
            timeout_s: how long to wait for that step, in seconds; None: without a limit.
        """
        self.stop_accepting()
        with self._wakeup:
            self._stopping = True
        self._abort_all(ShuttingDownError(STOPPED))
        await asyncio.to_thread(self._thread.join, timeout_s)

    @property
    def running(self) -> bool:
        """Whether the engine's thread is alive."""
        return self._thread.is_alive()

    def _abort_all(self, error: ShuttingDownError) -> None:
        """Fail every stream now. The engine drops the requests after its present step, which may never end."""
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
        except BaseException as error:  # `build` raises it
            self._built.set_exception(error)
            return
        while True:
            try:
                if self._turn():
                    return
            except BaseException as error:
                # The runner handles failed passes. This is a bug, or an exception that ends threads: the engine's
                # state is unknown. The thread goes on, to fail later requests with this error.
                if self.dead is not None:
                    raise
                logger.exception("the engine failed")
                self.engine.dead = EngineDeadError("the engine failed; restart the server")
                self.engine.dead.__cause__ = error
                self._hand_back(self.engine.abort_all(self.engine.dead))

    def _turn(self) -> bool:
        """Wait for work, pass it to the engine and run a step. Returns True if the thread is to end."""
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
        """Pass new requests, cancellations and calls to the engine. Call with the lock held.

        A place stays held until its request is in the scheduler's queue, so that each request is counted once.

        Returns:
            The terminal outputs of requests that the engine refused, and of aborted ones.
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
                except Exception as error:  # raised where the future is awaited
                    outcome.set_exception(error)
        self._calls.clear()
        if self._abort is not None:
            outputs += self.engine.abort_all(self._abort)
            self._abort = None
        return outputs

    def _hand_back(self, outputs: list[StepOutput]) -> None:
        if outputs:
            self.on_event_loop(self._deliver, outputs)

    def on_event_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call(*arguments)` on the event loop. For the engine's thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to read
            logger.debug("what a closed event loop was to be told was dropped")
