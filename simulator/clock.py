"""The virtual clock: time passes only when the simulation advances it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class VirtualClock:
    """The clock that a simulated engine reads.

    Attributes:
        now: seconds since the simulation began.
    """

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def wait_until(self, time_s: float) -> None:
        """Advance the clock to `time_s`. A time in the past changes nothing."""
        self.now = max(self.now, time_s)
