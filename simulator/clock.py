"""Time that passes when the simulation says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class VirtualClock:
    """What an engine reads instead of the machine's clock.

    Attributes:
        now: seconds since the simulation began.
    """

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def wait_until(self, time_s: float) -> None:
        """Go on to a time; one that is over already changes nothing."""
        self.now = max(self.now, time_s)
