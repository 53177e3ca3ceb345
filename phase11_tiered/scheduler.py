"""Phase 10's schedule. A prompt is not computed while blocks of its prefix are being read from the disk."""

from __future__ import annotations

from common.kv import SchedulerPool
from phase10_speculative.scheduler import SpeculativeScheduler
from phase11_tiered.config import Config

LOOK_S = 0.002  # time from step to step while nothing can be computed before blocks were read


class TieredScheduler(SpeculativeScheduler):
    """Phase 10's scheduler. In each step, requests get the blocks that were read for them (`Request.fetching`)."""

    config: Config
    _looked_s = 0.0

    def next_wake(self, now: float) -> float | None:
        """Return when the next step has something to do: not at once if nothing but reads goes on."""
        if self.active and all(request.fetching for request in self.active):
            return max(now, self._looked_s + LOOK_S)
        return super().next_wake(now)

    def admit(self, pool: SchedulerPool) -> None:
        for request in self.active:
            if request.fetching:
                pool.match_prefix(request)
        self._looked_s = self.clock()
        super().admit(pool)
