"""Functions that run in the engine's thread, between two steps, for callers in other threads.

Their arguments and results can be pickled: the caller may be in another process (`common.hosting.process`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.engine.scheduling import StepPlan
from common.engine.telemetry import StepRecord
from common.observing.frames import Frame, FrameMaker
from common.observing.trace import TraceBuffer, TraceFile, Tracer
from common.request import StepOutput

if TYPE_CHECKING:  # it imports torch, which the server's process does without
    from common.engine.engine import Engine

logger = logging.getLogger(__name__)

MAX_FRAMES_PER_S = 20
ENGINE_SHARE = 0.003  # of the engine thread's time, for making frames

Step = tuple[StepRecord, StepPlan, Sequence[StepOutput]]

#: Takes the frames of the live view. None: making them has failed, and no more will come.
Publish = Callable[[Frame | None], None]


class Watcher:
    """Makes frames of the engine's steps for the live view, and publishes them."""

    def __init__(self, engine: Engine, publish: Publish) -> None:
        self._publish = publish
        self.maker = FrameMaker(engine)
        self._due_s = 0.0
        self._left_out: Step | None = None  # the latest step, if no frame shows it

    def __call__(self, record: StepRecord, plan: StepPlan, outputs: Sequence[StepOutput]) -> None:
        self.maker.note(outputs)
        self._left_out = record, plan, outputs
        self.catch_up()

    def catch_up(self) -> None:
        """Publish a frame of the latest step if it has none and the rate limit allows a frame.

        Without this call, a frame that the limit delayed would wait for the next step, which may be far off.
        """
        now_s, began_s = time.monotonic(), time.thread_time()
        if self._left_out is None or now_s < self._due_s:
            return
        try:
            frame = self.maker.frame(*self._left_out)
        except Exception:  # a bug in the live view must not fail requests
            logger.exception("the live view failed")
            self._due_s = math.inf
            self._publish(None)
            return
        self._left_out = None
        self._publish(frame)
        took_s = time.thread_time() - began_s  # processor time: does not count other processes
        self._due_s = now_s + max(took_s / ENGINE_SHARE, 1 / MAX_FRAMES_PER_S)


class EngineCalls:
    """Reads, controls and traces an engine. Made and used in the engine's thread.

    Args:
        engine: the engine.
        publish: gets the frames of the live view.
    """

    def __init__(self, engine: Engine, publish: Publish) -> None:
        self._engine = engine
        self._publish = publish
        self._tracer = Tracer(engine)
        self._buffers: dict[int, TraceBuffer] = {}
        self._file: TraceFile | None = None
        self._watcher: Watcher | None = None

    def close(self) -> None:
        """Complete the trace file, if there is one. Called when the engine's thread ends."""
        if self._file is not None:
            self._tracer.stop(self._file)

    # ------------------------------------------------------------------ administration

    def reset_prefix_cache(self) -> int:
        """Free the cached blocks that no unfinished request uses. Returns their number."""
        return self._engine.reset_prefix_cache()

    def pause(self) -> None:
        self._engine.pause()

    def resume(self) -> None:
        self._engine.resume()

    def in_flight(self) -> bool:
        """Return whether a launched step is not committed yet."""
        return self._engine.runner.in_flight

    # ------------------------------------------------------------------ the live view

    def watch(self) -> None:
        """Publish frames of the steps from now on. The first is a key frame, which has the engine's whole state."""
        self._watcher = Watcher(self._engine, self._publish)
        self._engine.watchers.append(self._watcher)

    def unwatch(self) -> None:
        """Publish no more frames."""
        if self._watcher is not None:
            self._engine.unwatch(self._watcher)
            self._watcher = None

    def next_is_key(self) -> None:
        """Make the next frame a key frame, which has the engine's whole state."""
        if self._watcher is not None:
            self._watcher.maker.next_is_key()

    def catch_up(self) -> None:
        """Publish a frame of the latest step if it has none and the rate limit allows a frame."""
        if self._watcher is not None:
            self._watcher.catch_up()

    # ------------------------------------------------------------------ traces

    def trace_to(self, path: Path) -> None:
        """Record a trace into a file until the thread ends. Raises StartupError: the file cannot be opened."""
        self._file = TraceFile(path)
        self._tracer.start(self._file)

    def start_trace(self, number: int) -> None:
        """Start a recording into a buffer. `fetch_trace` and `stop_trace` take the same `number`."""
        buffer = self._buffers[number] = TraceBuffer()
        self._tracer.start(buffer)

    def fetch_trace(self, number: int) -> tuple[bytes, bool]:
        """Return a recording's events since the last fetch, as bytes of its JSON, and whether no more will come."""
        buffer = self._buffers[number]
        return buffer.fetch(), buffer.closed

    def stop_trace(self, number: int) -> bytes:
        """End a recording. Returns its events since the last fetch; no bytes if it was stopped before."""
        buffer = self._buffers.pop(number, None)
        if buffer is None:
            return b""
        self._tracer.stop(buffer)
        return buffer.fetch()
