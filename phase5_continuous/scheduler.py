"""Continuous batching (Yu et al. 2022, Orca): requests join and leave the batch on every step.

```text
time ──>
  seat 1  A ██████████ D ██████████████    D takes A's seat in the step after A's last
  seat 2  B ████████████████████ F ████
  seat 3  C ████ E ████████ G █████████    no request waits for B
```
"""

from __future__ import annotations

from common.engine.scheduling import PrefillChunk, Scheduler, StepPlan
from common.kv import SchedulerPool
from common.request import Request


class ContinuousScheduler(Scheduler):
    """Retires requests that are done and admits waiting requests (`next_waiting`), in every step."""

    def queue_room(self) -> int:
        """Return how many more requests the queue takes. Free seats count, since the next step fills them.

        The seats may stay free: if memory is short (from phase 6 on), or the engine is paused. Then more
        requests than `max_waiting_requests` can wait: one more for each free seat.
        """
        return super().queue_room() + self.free_seats

    def _clear_seats(self) -> list[Request]:
        done = [request for request in self.active if request.is_done]
        if done:
            self.active = [request for request in self.active if not request.is_done]
        return done

    def admit(self, pool: SchedulerPool) -> None:
        self._fill_seats(pool)

    def plan(self) -> StepPlan:
        """Plan one token for each request that wants one (`Request.wants_token`), and the whole prefill of
        each newly admitted request."""
        return StepPlan(
            decode=tuple(r for r in self.active if r.wants_token),
            prefill=tuple(PrefillChunk.rest(r) for r in self.active if r.wants_prefill),
        )
