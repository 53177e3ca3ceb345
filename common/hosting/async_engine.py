"""The engine's interface to asyncio: streams of outputs, places in the queue, and the shutdown.

```text
event loop                                   engine
  hold_places ─> submit, cancel ───────────> its thread (`common.hosting.thread`), in this process
  streams      <── outputs, once a step ───  or in a process of its own (`common.hosting.process`)
```
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from common.engine.commit import terminal_output
from common.engine.requests import EngineFront
from common.engine.telemetry import RequestTelemetry, RequestTimes, StepRecord
from common.errors import EngineDeadError, ShuttingDownError
from common.hosting.calls import EngineCalls
from common.hosting.thread import STOPPED, Deliver, queue_full
from common.observing.frames import Frame
from common.request import Request, StepOutput

P = ParamSpec("P")
T = TypeVar("T")


class EngineHost(Protocol):
    """The interface of `EngineThread`, which runs an engine in this process, and of `EngineProcess`, which runs it
    in another. The docstrings of `EngineThread` describe the methods."""

    @property
    def engine(self) -> EngineFront: ...
    @property
    def running(self) -> bool: ...
    @property
    def step_s(self) -> float: ...
    def build(self) -> EngineFront: ...
    def start(self, deliver: Deliver, publish: Callable[[Frame | None], None]) -> None: ...
    def queue_room(self) -> int: ...
    def num_waiting(self) -> int: ...
    def submit(self, requests: Sequence[Request]) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def call(
        self, function: Callable[Concatenate[EngineCalls, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    def abort(self, error: Exception) -> None: ...
    def stop(self) -> None: ...
    def join(self, timeout_s: float | None = None) -> None: ...


class WakeUp:
    """Wakes the one task that waits. Cheaper than an `asyncio.Event`, which can wake any number of tasks."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the task, if one waits."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        """Return a future that `set` completes. The task awaits it after it has found nothing to do."""
        self._waiting = asyncio.get_running_loop().create_future()
        return self._waiting


class RequestStream:
    """Iterates over one request's outputs as they arrive. Ends after the terminal output.

    A reader that stops early must call `cancel`.

    Attributes:
        received_tokens: number of tokens that have arrived, read or not.
        first_token_s: when the first token arrived, on the clock of `time.monotonic`; None before.
        latest_token_s: when the latest token arrived; 0 before the first.
        longest_gap_s: the longest time between two successive tokens, in seconds.
        news: wakes the reader when an output has arrived. Streams that are read together share one.
        last: the terminal output; None before it has arrived.
    """

    def __init__(self, worker: EngineWorker, request: Request) -> None:
        self.request = request
        self._worker = worker
        self._outputs: deque[StepOutput] = deque()
        self.news = WakeUp()
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
            await self.news.wait()
        output = self._outputs.popleft()
        self._ended = output.finished
        return output

    def take(self) -> list[StepOutput]:
        """Return the outputs that have arrived and were not read yet, without waiting."""
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def put(self, output: StepOutput) -> None:
        """Queue an output for the reader, and count its token and times in the telemetry."""
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
        if (
            output.completion_tokens < self.received_tokens
        ):  # the engine's process has died, and its counts with it
            output = dataclasses.replace(output, completion_tokens=self.received_tokens)
        self.received_tokens = output.completion_tokens
        if output.finished:
            self.last = output
            times = RequestTimes(
                self._arrived_s, self.request.scheduled_s, self.first_token_s, self.latest_token_s, now
            )
            telemetry.end(output, times)
        self._outputs.append(output)
        self.news.set()

    def put_error(self, error: Exception) -> None:
        """End the stream with an error at once, without waiting for the engine, which may be inside a step."""
        ended = terminal_output(self.request)
        self.put(
            dataclasses.replace(
                ended, finish_reason=None, error=error, completion_tokens=self.received_tokens
            )
        )

    def cancel(self) -> None:
        """Cancel the request, so that the engine frees its place in the queue or its memory. The stream then ends
        with the terminal output. Does nothing if the terminal output has arrived already."""
        self._worker.cancel(self.request.request_id)


class HeldPlaces:
    """Context manager: holds places in the queue for requests that are still being tokenized.

    On exit, places for which no request was submitted are released.

    Args:
        worker: the engine's worker.
        count: number of places, which the worker has counted as held already.
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
        """Submit requests, exactly as many as places are held. Returns the streams of their outputs, in order.

        Raises:
            ValueError: the number of requests is not the number of held places.
            ShuttingDownError: as `EngineWorker.submit`.
        """
        if len(requests) != self._count:
            raise ValueError(f"{self._count} places are held, for {len(requests)} requests")
        streams = self._worker.submit(requests)
        self._count = 0
        return streams


class EngineWorker:
    """Serves streams of an engine's outputs on an event loop.

    Call `build` first. Call all other methods in the event loop's thread, unless they say otherwise.

    Args:
        host: builds and runs the engine.

    Attributes:
        requests: telemetry of the submitted requests.
        draining: whether new requests are refused, because the server shuts down.
        on_frame: called with each frame of the live view; with None if making frames has failed for good.
    """

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self.requests = RequestTelemetry()
        self.on_frame: Callable[[Frame | None], None] = lambda _: None
        self._held = 0  # places that are promised to requests which are still being tokenized
        self._streams: dict[str, RequestStream] = {}
        self.draining = False
        self._aborted: ShuttingDownError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def build(self) -> EngineFront:
        """Block until the engine is built. Raises any error of building it."""
        return self._host.build()

    @property
    def engine(self) -> EngineFront:
        """The engine. Call `build` first."""
        return self._host.engine

    @property
    def dead(self) -> EngineDeadError | None:
        """The error that ended the engine; None while it runs."""
        return self.engine.dead

    @property
    def latest_step(self) -> StepRecord:
        """The record of the latest step; an empty one if the engine is dead, since it has no requests any more."""
        return StepRecord(0, 0.0) if self.dead is not None else self.engine.telemetry.latest

    @property
    def step_s(self) -> float:
        """Seconds since the engine began its step, or was sent a request that it has not taken; 0 if it is idle."""
        return self._host.step_s

    @property
    def running(self) -> bool:
        """Whether the engine's thread or process is alive."""
        return self._host.running

    def start(self) -> None:
        """Start accepting requests. Call it on the event loop that will read the streams."""
        self._host.start(self._deliver, lambda frame: self.on_frame(frame))

    # ------------------------------------------------------------------ requests

    def hold_places(self, count: int = 1) -> HeldPlaces:
        """Hold places in the queue for `count` requests, all or none, before the requests are tokenized.

        Raises:
            QueueFullError: fewer than `count` places are free for them (see `check_room`).
            EngineDeadError, ShuttingDownError: no requests are accepted any more.
        """
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
        limit = self.engine.config.max_waiting_requests
        alone = not self._streams and not self._held
        kept = 0 if count == 1 or alone else limit // 4
        if count > self.queue_room() - kept:
            raise queue_full(limit, count)

    def _check_accepting(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(str(self.dead))
        if self.draining:
            raise ShuttingDownError("the server is shutting down")

    def queue_room(self) -> int:
        """Return how many more requests the queue can take now: places that are neither taken nor held."""
        return self._host.queue_room() - self._held

    def num_waiting(self) -> int:
        """Return how many requests wait to be computed, including those that are still being tokenized."""
        return self._host.num_waiting() + self._held

    def give_back_places(self, unused: int) -> None:
        """Release `unused` held places. Only `HeldPlaces` calls this, when it ends."""
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
        self._held -= len(requests)  # from here on, the host counts them
        self._host.submit(requests)
        return streams

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if its stream still runs. The stream gets the terminal output after the next step."""
        if request_id in self._streams:
            self._host.cancel(request_id)

    async def reset_prefix_cache(self) -> int:
        """Free the unused cached blocks between two steps. Returns their number.

        Raises:
            EngineDeadError, ShuttingDownError: no requests are accepted any more.
        """
        self._check_accepting()
        return await asyncio.wrap_future(self.call(EngineCalls.reset_prefix_cache))

    async def pause(self) -> None:
        """Pause the engine until `resume`, and wait until all outputs in flight are delivered.

        New requests queue during the pause.

        Raises:
            EngineDeadError, ShuttingDownError: no requests are accepted any more.
        """
        self._check_accepting()
        await asyncio.wrap_future(self.call(EngineCalls.pause))
        while await asyncio.wrap_future(self.call(EngineCalls.in_flight)):
            pass  # each call waits for a step, and each step delivers a step in flight
        self._check_accepting()

    async def resume(self) -> None:
        """Let the engine plan steps again. Raises as `pause` does."""
        self._check_accepting()
        await asyncio.wrap_future(self.call(EngineCalls.resume))

    def call(
        self, function: Callable[Concatenate[EngineCalls, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Call a method of `EngineCalls` in the engine's thread, between two steps. Returns a future of its result.

        Raises:
            ShuttingDownError: the engine's thread is stopping.
        """
        return self._host.call(function, *args, **kwargs)

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

    # ------------------------------------------------------------------ ending

    def stop_accepting(self) -> None:
        """Make `hold_places` refuse new requests. Accepted requests go on."""
        self.draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait until every accepted one is answered. Returns True.

        After `timeout_s` seconds, fail the unanswered requests and return False.
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
        """Fail the unanswered requests at once, end the engine's thread or process after its present step, and wait
        for its end.

        Args:
            timeout_s: how long to wait at most, in seconds; None: without a limit.
        """
        self.stop_accepting()
        self._abort_all(ShuttingDownError(STOPPED))
        self._host.stop()
        await asyncio.to_thread(self._host.join, timeout_s)

    def _abort_all(self, error: ShuttingDownError) -> None:
        """Fail every stream now. The engine drops the requests after its present step, which may never end."""
        self._aborted = error
        for stream in self._streams.values():
            stream.put_error(error)
        self._streams.clear()
        self._mark_idle()
        self._host.abort(error)
