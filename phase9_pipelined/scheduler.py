"""Phase 8's schedule, for steps planned before the tokens of the last one are read.

```text
step t+2 is planned: step t was read, step t+1 computes

  A  had 7 of 9 tokens after t, its 8th is in flight     planned: its 9th
  B  had 8 of 9 tokens after t, its 9th is in flight     left out: its end is foreseen
  C  ended at t with EOS, which could not be foreseen    a zombie: holds its memory until t+1 is read
```

The request's own counts say this (`wants_token`, `num_tokens`, `is_done`). The scheduler adds when to wait.
"""

from __future__ import annotations

from common.kv import SchedulerPool
from common.request import Request
from common.scheduling import Clock, StepPlan
from phase8_prefix.scheduler import PrefixScheduler
from phase9_pipelined.config import Config


class PipelinedScheduler(PrefixScheduler):
    """Plans nothing while steps in flight must be committed first: before a preemption, and before a prefill if
    `prefill_mode` is "drained"."""

    config: Config

    def __init__(self, config: Config, clock: Clock) -> None:
        super().__init__(config, clock)
        self._out_of_room = False

    @property
    def in_flight(self) -> bool:
        """Whether a step in flight computes for an active request."""
        return any(request.inflight_refs for request in self.active)

    def make_room(self, pool: SchedulerPool) -> list[Request]:
        self._out_of_room = False
        return super().make_room(pool)

    def _make_way(self) -> list[Request]:
        """Preempt nobody while a step is in flight, since that step uses the memory: wait until it is committed.
        Requests that end by then may leave enough room."""
        self._out_of_room = self.in_flight
        return [] if self._out_of_room else super()._make_way()

    def admit(self, pool: SchedulerPool) -> None:
        if not self._out_of_room:  # free memory goes to the active requests that wait for it
            super().admit(pool)

    def plan(self) -> StepPlan:
        if self._out_of_room:
            return StepPlan()
        plan = super().plan()
        waits = self.config.prefill_mode == "drained" and plan.prefill and self.in_flight
        return StepPlan() if waits else plan
