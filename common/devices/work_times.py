"""Records when a stream (`common.devices.streams`) ran its work, for traces and measurements."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")

MOST_TIMES = 1000  # how many of the latest times are kept until `take`; a tape's player keeps as many


class Work(NamedTuple):
    """When submitted work began and ended, in seconds on the clock of `time.monotonic`. `key`: as for
    `Stream.submit`."""

    key: Hashable
    began_s: float
    ended_s: float

    @property
    def name(self) -> str:
        """The key as text; of a tuple, its first item."""
        return str(self.key[0] if isinstance(self.key, tuple) else self.key)


class HostTimes:
    """Records when functions ran on the host, and keeps the latest `MOST_TIMES` times until `take`."""

    def __init__(self) -> None:
        self._done: deque[Work] = deque(maxlen=MOST_TIMES)

    def timed(self, key: Hashable, function: Callable[[], T]) -> Callable[[], T]:
        """Return a function that calls `function` and records under `key` when the call began and ended."""

        def timed_function() -> T:
            began_s = time.monotonic()
            try:
                return function()
            finally:
                self._done.append(Work(key, began_s, time.monotonic()))

        return timed_function

    def take(self) -> list[Work]:
        """Return the work that has ended since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]


class DeviceTimes:
    """Times kernels on a GPU, on the host's clock. Keeps the latest `MOST_TIMES` times until `take`.

    Make and use it inside the timed CUDA stream. The constructor blocks until the stream's work has ended, and then
    compares the two clocks.
    """

    def __init__(self) -> None:
        self._zero = _mark()
        self._zero.synchronize()
        self._zero_s = time.monotonic()
        self._marks: deque[tuple[Hashable, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=MOST_TIMES)

    @contextmanager
    def around(self, key: Hashable) -> Iterator[None]:
        """Context manager: times the kernels that are launched inside it, under `key`."""
        began = _mark()
        yield
        self._marks.append((key, began, _mark()))

    def take(self) -> list[Work]:
        """Return the work that has ended since the last call.

        Each time is measured from the end of the previous work. CUDA gives the time between two events as a
        float32, which would be too coarse if the first event were an hour old.
        """
        done: list[Work] = []
        while self._marks and self._marks[0][2].query():  # type: ignore[no-untyped-call]
            key, began, ended = self._marks.popleft()
            done.append(Work(key, self._seconds(began), self._seconds(ended)))
            self._zero, self._zero_s = ended, done[-1].ended_s
        return done

    def _seconds(self, event: torch.cuda.Event) -> float:
        after_ms: float = self._zero.elapsed_time(event)
        return self._zero_s + after_ms / 1e3


def _mark() -> torch.cuda.Event:
    """Record an event in the current stream. Its time is when the stream reaches it."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record()
    return event
