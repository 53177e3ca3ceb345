"""Continuous batching (Yu et al. 2022, Orca): requests join and leave the batch on every step.

```text
time ──>
  seat 1  A ██████████ D ██████████████    D takes A's seat in the step after A's last
  seat 2  B ████████████████████ F ████
  seat 3  C ████ E ████████ G █████████    no request waits for B
```
"""

from __future__ import annotations

from common.kv import SchedulerPool
from common.request import Request, RequestState
from common.scheduling import PrefillChunk, Scheduler, StepPlan


class ContinuousScheduler(Scheduler):
    """Retires finished requests and admits waiting ones, first come, first served, in every step."""

    def queue_room(self) -> int:
        """Return how many more requests the queue takes. Free seats count, since the next step fills them.

        If memory is short (from phase 6 on) the seats may stay free. Then that many more requests than
        `max_waiting_requests` can wait.
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
        """Plan one token for each decoding request, and the prompts of newly admitted requests."""
        return StepPlan(
            decode=tuple(r for r in self.active if r.wants_token),
            prefill=tuple(PrefillChunk.rest(r) for r in self.active if r.state is RequestState.PREFILL),
        )
