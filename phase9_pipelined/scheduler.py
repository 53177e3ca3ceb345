"""Phase 8's schedule, for steps that are planned before the tokens of the previous step are read.

```text
step t+2 is planned: step t was read, step t+1 computes

  A  had 7 of 9 tokens after t, its 8th is in flight     planned: its 9th
  B  had 8 of 9 tokens after t, its 9th is in flight     left out: its end is foreseen
  C  ended at t with EOS, which could not be foreseen    a zombie: holds its memory until t+1 is read
```

A request's own counts decide whether it is planned, and when it is retired (`wants_token`, `num_tokens`,
`is_done`). This scheduler decides only which steps must wait for a commit.
"""

from __future__ import annotations

from common.engine.scheduling import StepPlan
from common.kv import SchedulerPool
from common.request import Request
from phase8_prefix.scheduler import PrefixScheduler
from phase9_pipelined.config import Config


class PipelinedScheduler(PrefixScheduler):
    """Plans nothing while steps in flight must be committed first: before a preemption, and before a prefill if
    `prefill_mode` is "drained"."""

    config: Config
    _out_of_room = False  # whether this step plans nothing, since a preemption must wait for a commit

    @property
    def in_flight(self) -> bool:
        """Whether any step in flight computes for an active request."""
        return any(request.inflight_refs for request in self.active)

    def make_room(self, pool: SchedulerPool) -> list[Request]:
        self._out_of_room = False
        return super().make_room(pool)

    def _make_way(self, request: Request) -> list[Request]:
        """Preempt `request` and return it in a list, but only if no step is in flight, since a step in flight
        uses the requests' memory.

        Otherwise return an empty list. Then this step plans nothing and commits the oldest step in flight.
        Requests that end with that commit may free enough memory. The step admits no request either: a preemption
        is needed only while no block or no seat is free.
        """
        self._out_of_room = self.in_flight
        return [] if self._out_of_room else super()._make_way(request)

    def plan(self) -> StepPlan:
        if self._out_of_room:
            return StepPlan()
        plan = super().plan()
        waits = self.config.prefill_mode == "drained" and plan.prefill and self.in_flight
        return StepPlan() if waits else plan
