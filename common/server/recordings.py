"""Traces that clients record (`GET /trace`): how many at a time, and their life from first event to last."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from common.errors import ShuttingDownError
from common.server.errors import from_exception, unavailable
from common.trace import TraceBuffer, Tracer
from common.worker import EngineWorker

#: Each recording writes every step's events again, in the engine's thread.
MAX_RECORDINGS = 4
FETCH_S = 0.1  # between two pieces of a trace


class Recordings:
    """The recordings that run.

    Args:
        worker: the engine's.
        tracer: the engine's, called in the engine's thread only.
    """

    def __init__(self, worker: EngineWorker, tracer: Tracer) -> None:
        self.worker = worker
        self.tracer = tracer
        self._open: set[Recording] = set()

    def open(self, seconds: float) -> Recording:
        """Return a recording that has not begun; close it in the end.

        Raises:
            ApiError: 503, too many run already, or the server ends.
        """
        if self.worker.draining:
            raise from_exception(ShuttingDownError("draining: the server is shutting down"))
        if len(self._open) >= MAX_RECORDINGS:
            raise unavailable(
                f"{MAX_RECORDINGS} traces are being recorded, the most at a time: try again later",
                code="too_many_traces",
                retry_after_s=5,
            )
        recording = Recording(self, seconds)
        self._open.add(recording)
        return recording

    def close(self, recording: Recording) -> None:
        """Stop a recording, whether or not it has begun: the engine's thread makes its calls in order."""
        self._open.discard(recording)
        with contextlib.suppress(ShuttingDownError):  # the engine's thread ends, and its recordings with it
            self.worker.call(lambda _: self.tracer.stop(recording.buffer))


class Recording:
    """One client's recording."""

    def __init__(self, recordings: Recordings, seconds: float) -> None:
        self._recordings = recordings
        self._seconds = seconds
        self.buffer = TraceBuffer()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Record for as long as was asked for, and return the events as they come."""
        worker, tracer, buffer = self._recordings.worker, self._recordings.tracer, self.buffer
        clock = asyncio.get_running_loop().time
        await asyncio.wrap_future(worker.call(lambda _: tracer.start(buffer)))
        until_s = clock() + self._seconds
        while (left_s := until_s - clock()) > 0 and not buffer.closed and not worker.draining:
            await asyncio.sleep(min(left_s, FETCH_S))
            yield buffer.fetch()
        await asyncio.wrap_future(worker.call(lambda _: tracer.stop(buffer)))
        yield buffer.fetch()

    def close(self) -> None:
        self._recordings.close(self)
