"""Static batching: collects a batch, runs it until its last request is done, then collects the next.

```text
time ──>
  batch 1  A ████████████           A and C are done early; their rows run on, idle,
           B ████████████████████   until B is done and the batch retires whole
           C ████████
  batch 2                        D ██████████      D came just after batch 1 had formed
                                 E ██████████████
```
"""

from __future__ import annotations

from typing import ClassVar

from common.engine.scheduling import Clock, PrefillChunk, Scheduler, StepPlan
from common.kv import SchedulerPool
from common.request import Request, RequestState
from phase4_static.config import Config


class StaticScheduler(Scheduler):
    """Schedules one batch at a time.

    A batch starts when `max_batch_size` requests wait, or `batch_wait_timeout_s` seconds after the empty
    queue of an idle engine got a request. If requests wait when a batch retires, the seconds count from then.
    """

    has_priorities: ClassVar[bool] = False  # while a batch runs, none of its requests can be preempted

    def __init__(self, config: Config, clock: Clock) -> None:
        super().__init__(config, clock)
        self.batch_wait_timeout_s = config.batch_wait_timeout_s
        self._forming_since: float | None = None  # when the next batch began to collect requests

    def add_request(self, request: Request) -> bool:
        taken = super().add_request(request)
        self._start_timer()
        return taken

    def retire(self) -> list[Request]:
        retired = super().retire()
        self._start_timer()
        return retired

    def _clear_seats(self) -> list[Request]:
        """Remove and return the whole batch once all its requests have ended. Until then, return []."""
        if not all(request.is_terminal for request in self.active):
            return []
        done, self.active = self.active, []
        return done

    def make_room(self, pool: SchedulerPool) -> list[Request]:  # noqa: ARG002 - no request leaves a batch
        return []

    def admit(self, pool: SchedulerPool) -> None:
        """If no batch runs, admit the next batch, once it is full or has waited long enough."""
        if not self.active and self._is_due(self.clock()):
            self._fill_seats(pool)
            self._forming_since = None

    def plan(self) -> StepPlan:
        """Plan the whole batch: all prompts in the first step, one token of every row in later steps.

        Requests that have ended are part of the plan, since their rows are computed, too.
        """
        if any(request.state is RequestState.PREFILL for request in self.active):
            return StepPlan(prefill=tuple(PrefillChunk(r, 0, len(r.token_ids)) for r in self.active))
        return StepPlan(decode=tuple(self.active))

    # ------------------------------------------------------------------ time

    def next_wake(self, now: float) -> float | None:
        if self.active:
            return now
        if not self.waiting:
            return None
        return now if self._is_due(now) else self._deadline()

    def _start_timer(self) -> None:
        """Let the next batch's timer run while no batch runs and requests wait. Otherwise clear the timer."""
        if self.active or not self.waiting:
            self._forming_since = None
        elif self._forming_since is None:
            self._forming_since = self.clock()

    def _is_due(self, now: float) -> bool:
        """Return whether the waiting requests are a full batch, or the time to collect them is over."""
        return len(self.waiting) >= self.config.max_batch_size or (
            self._forming_since is not None and now >= self._deadline()
        )

    def _deadline(self) -> float:
        """Return the time on the engine's clock at which the next batch starts, even if it is not full."""
        assert self._forming_since is not None
        return self._forming_since + self.batch_wait_timeout_s
