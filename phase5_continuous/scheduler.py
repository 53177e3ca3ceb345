"""Continuous batching (Yu et al. 2022, Orca): the batch is made anew on every step.

```text
time ──>
  seat 1  A ██████████ D ██████████████    D takes A's seat in the step after A's last
  seat 2  B ████████████████████ F ████
  seat 3  C ████ E ████████ G █████████    nobody waits for B
```
"""

from __future__ import annotations

from common.kv import SchedulerPool
from common.request import Request, RequestState
from common.scheduling import PrefillChunk, Scheduler, StepPlan


class ContinuousScheduler(Scheduler):
    """Retire whoever is done, admit whoever waits, first come first served, in every step."""

    def queue_room(self) -> int:
        """Free seats count as room: the next step gives them to those who wait, as far as there is memory.

        A slot is there for every seat. Where memory is another limit (phase 6) and has run out, they stay free, and
        that many more than `max_waiting_requests` may come to wait.
        """
        return super().queue_room() + self.free_seats

    def _clear_seats(self) -> list[Request]:
        done = [request for request in self.active if request.is_done]
        self.active = [request for request in self.active if not request.is_done]
        return done

    def admit(self, pool: SchedulerPool) -> None:
        self._fill_seats(pool)

    def plan(self) -> StepPlan:
        """A token for everyone who decodes, and the newcomers' prompts."""
        return StepPlan(
            decode=tuple(r for r in self.active if r.wants_token),
            prefill=tuple(PrefillChunk.rest(r) for r in self.active if r.state is RequestState.PREFILL),
        )
