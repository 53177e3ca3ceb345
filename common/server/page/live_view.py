"""Watches the running engine: its steps as they come (`GET /steps`), and traces that clients record (`GET /trace`).

A frame describes one step (`common.observing.frames`). No frames are made while no client watches.

```text
engine's process (`common.hosting.calls`)             event loop
  step ─> watcher: a frame, unless it is too soon ──> publish ─┬─> a viewer's queue ─> events ─> its page
                                                               └─> another's, full: emptied, its frames counted
```

Watching must not slow down the engine: `common.hosting.calls` bounds the number of frames a second, and the share
of the engine's time for making them. Steps in between get no frame. A viewer that does not keep up misses frames
and goes on with a key frame, which holds the whole state.

```text
event: begin     values that hold for all frames: `common.observing.frames`, header
event: step      a frame
event: missed    {"frames": n}: n frames were dropped for this viewer since its first frame
event: end       the last event: the server shuts down, its engine is dead, or frames cannot be made any more
```
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator

from common.errors import ShuttingDownError
from common.hosting.async_engine import AsyncEngine
from common.hosting.calls import EngineCalls
from common.observing.frames import Frame, Header, header
from common.server.api.stream import event
from common.server.errors import unavailable

MAX_VIEWERS = 8
MAX_QUEUED = 50  # frames for each viewer
TICK_S = 0.25  # seconds between two checks whether the latest step has a frame
#: Most recordings at a time. Each recording writes every step's events again, in the engine's thread.
MAX_RECORDINGS = 4
FETCH_S = 0.1  # seconds between two pieces of a trace


def check_serves(engine: AsyncEngine) -> None:
    """Raise the error that says why an engine takes no requests any more, if it takes none."""
    if engine.dead is not None:
        raise engine.dead
    if engine.draining:
        raise ShuttingDownError("draining: the server is shutting down")


class Viewer:
    """One client of `GET /steps`, and the frames that the client has not read yet.

    Attributes:
        needs_key: whether the viewer drops frames until the next key frame.
        missed: number of frames dropped since the first frame.
    """

    def __init__(self, header: Header) -> None:
        self._header = header
        self._frames: deque[Frame] = deque()
        self._news = asyncio.Event()
        self._has_begun = self._ended = False
        self.needs_key = True
        self.missed = 0  # frames

    def put(self, frame: Frame) -> None:
        if self._ended:
            return
        if self.needs_key and not frame.get("key"):
            self.missed += self._has_begun
            return
        self.needs_key, self._has_begun = False, True
        if len(self._frames) >= MAX_QUEUED:
            self.missed += len(self._frames) + 1
            self._frames.clear()
            self.needs_key = True
            return
        self._frames.append(frame)
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    async def events(self) -> AsyncIterator[bytes]:
        yield event(self._header, "begin")
        told = 0
        # Frames may have come, or been dropped, while a slow client held this generator up.
        while not self._ended or self._frames or self.missed > told:
            await self._news.wait()
            self._news.clear()
            frames = list(self._frames)
            self._frames.clear()
            lines = [event(frame, "step") for frame in frames]
            if self.missed > told:
                told = self.missed
                lines.append(event({"frames": told}, "missed"))
            if lines:
                yield b"".join(lines)
        yield event({}, "end")


class LiveView:
    """The viewers of one server. The engine makes frames while there is a viewer. Used on the event loop only."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        engine.on_frame = self.publish
        self._viewers: list[Viewer] = []
        self._ticking: asyncio.Task[None] | None = None

    def open(self) -> Viewer:
        """Return a new viewer. Call `close` when its stream has ended.

        Raises:
            ApiError: 503, there are `MAX_VIEWERS` viewers already.
            ShuttingDownError, EngineDeadError: no steps will come.
        """
        check_serves(self._engine)
        if len(self._viewers) >= MAX_VIEWERS:
            raise unavailable(
                f"{MAX_VIEWERS} look already, as many as may: close another page",
                code="too_many_viewers",
                retry_after_s=5,
            )
        viewer = Viewer(header(self._engine.facts))
        self._viewers.append(viewer)
        if self._ticking is None:
            self._engine.call(EngineCalls.watch)
            self._ticking = asyncio.create_task(self._tick())
        self._engine.call(EngineCalls.next_is_key)
        return viewer

    def close(self, viewer: Viewer) -> None:
        self._viewers.remove(viewer)
        if not self._viewers and self._ticking is not None:
            self._engine.call(EngineCalls.unwatch)
            self._ticking.cancel()
            self._ticking = None

    def publish(self, frame: Frame | None) -> None:
        """Pass a frame to every viewer. None: no more frames will come, so every viewer's stream is ended."""
        if frame is None:
            self.end()
            return
        for viewer in self._viewers:
            viewer.put(frame)
        if any(viewer.needs_key for viewer in self._viewers):
            self._engine.call(EngineCalls.next_is_key)

    def end(self) -> None:
        """End every viewer's stream."""
        for viewer in self._viewers:
            viewer.end()

    async def _tick(self) -> None:
        """Every `TICK_S` seconds, have a frame of the latest step made if the step has none.

        If the server is shutting down or its engine is dead, end all streams instead.
        """
        while True:
            await asyncio.sleep(TICK_S)
            if self._engine.draining or self._engine.dead is not None:
                self.end()
            else:
                self._engine.call(EngineCalls.catch_up)


class Recordings:
    """The traces that clients are recording (`GET /trace`), at most `MAX_RECORDINGS` at a time."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._running = 0

    def check_room(self) -> None:
        """Check that another recording may begin.

        Raises:
            ApiError: 503, too many recordings run.
            ShuttingDownError, EngineDeadError: no steps will come.
        """
        check_serves(self._engine)
        if self._running >= MAX_RECORDINGS:
            raise unavailable(
                f"{MAX_RECORDINGS} traces are being recorded, the most at a time: try again later",
                code="too_many_traces",
                retry_after_s=5,
            )

    async def record(self, seconds: float) -> AsyncIterator[bytes]:
        """Record steps for this number of seconds, and yield the trace's bytes as they come.

        Ends early if the server shuts down, or if the client is so slow that the recording's buffer is full.
        """
        engine, clock, number = self._engine, asyncio.get_running_loop().time, next(self._numbers)
        self._running += 1
        try:
            await asyncio.wrap_future(engine.call(EngineCalls.start_trace, number))
            until_s, closed = clock() + seconds, False
            while (left_s := until_s - clock()) > 0 and not closed and not engine.draining:
                await asyncio.sleep(min(left_s, FETCH_S))
                piece, closed = await asyncio.wrap_future(engine.call(EngineCalls.fetch_trace, number))
                yield piece
            yield await asyncio.wrap_future(engine.call(EngineCalls.stop_trace, number))
        finally:
            # A recording that is about to start is stopped, too: calls run in order.
            self._running -= 1
            with contextlib.suppress(ShuttingDownError):  # the engine ends, and its recordings with it
                engine.call(EngineCalls.stop_trace, number)
