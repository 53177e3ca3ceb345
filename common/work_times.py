"""When a stream (`common.streams`) did what it was given, for whoever wants to see it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")

MOST_TIMES = 1000  # that wait to be asked for; a tape's player keeps as many


class Work(NamedTuple):
    """Work that was done: the key it was handed in under, and when, in seconds on the clock of `time.monotonic`."""

    key: Hashable
    began_s: float
    ended_s: float


class HostTimes:
    """Of functions that a thread calls."""

    def __init__(self) -> None:
        self._done: deque[Work] = deque(maxlen=MOST_TIMES)

    def timed(self, key: Hashable, function: Callable[[], T]) -> Callable[[], T]:
        """The same function; when it has been called is remembered."""

        def timed_function() -> T:
            began_s = time.monotonic()
            try:
                return function()
            finally:
                self._done.append(Work(key, began_s, time.monotonic()))

        return timed_function

    def take(self) -> list[Work]:
        """Those since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]


class DeviceTimes:
    """Of kernels on a GPU, on the host's clock: the two clocks meet here, where nothing is in flight.

    Made and entered in the stream that is timed.
    """

    def __init__(self) -> None:
        self._zero = _mark()
        self._zero.synchronize()
        self._zero_s = time.monotonic()
        self._marks: deque[tuple[Hashable, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=MOST_TIMES)

    @contextmanager
    def around(self, key: Hashable) -> Iterator[None]:
        """What is launched inside is timed."""
        began = _mark()
        yield
        self._marks.append((key, began, _mark()))

    def take(self) -> list[Work]:
        """What has ended since the last call. Each end is the zero of the next: an event tells its distance from
        another in float32, too coarse after an hour."""
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
    """The time at which the present stream gets here."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record()
    return event
