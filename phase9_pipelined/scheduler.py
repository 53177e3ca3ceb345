"""Phase 8's schedule for steps whose results nobody has seen yet.

```text
what is known when step t+2 is planned      step t is read, step t+1 computes

  A  had 7 of 9 tokens after t, its 8th is on its way     planned: its 9th
  B  had 8 of 9 tokens after t, its 9th is on its way     left out: it ends, that can be foreseen
  C  ended at t, with EOS: nobody could know              a zombie: holds its memory until t+1 is read
```

A request's own counts say so (`wants_token`, `num_tokens`, `is_done`); what is added here is when to wait.
"""

from __future__ import annotations

from common.kv import SchedulerPool
from common.request import Request
from common.scheduling import Clock, StepPlan
from phase8_prefix.scheduler import PrefixScheduler
from phase9_pipelined.config import Config


class PipelinedScheduler(PrefixScheduler):
    """Plans nothing while something must end first: whoever is to be preempted, or the steps before a prefill."""

    config: Config

    def __init__(self, config: Config, clock: Clock) -> None:
        super().__init__(config, clock)
        self._out_of_room = False

    @property
    def in_flight(self) -> bool:
        """Whether a step computes for anybody."""
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
        if not self._out_of_room:  # what is free is for those who wait for room
            super().admit(pool)

    def plan(self) -> StepPlan:
        if self._out_of_room:
            return StepPlan()
        plan = super().plan()
        waits = self.config.prefill_mode == "drained" and plan.prefill and self.in_flight
        return StepPlan() if waits else plan
