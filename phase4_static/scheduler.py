"""Static batching: collect, run until the last member is done, take the next batch.

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

from common.kv import SchedulerPool
from common.request import Request, RequestState
from common.scheduling import Clock, PrefillChunk, Scheduler, StepPlan
from phase4_static.config import Config


class StaticScheduler(Scheduler):
    """A batch at a time.

    A batch forms when `max_batch_size` requests wait, or `batch_wait_timeout_s` after the first of them came to
    an idle engine. For a backlog the time starts when the batch before retires.
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        super().__init__(config, clock)
        self.batch_wait_timeout_s = config.batch_wait_timeout_s
        self._forming_since: float | None = None  # when the batch to come began to wait for company

    def add_request(self, request: Request) -> bool:
        taken = super().add_request(request)
        self._start_timer()
        return taken

    def retire(self) -> list[Request]:
        retired = super().retire()
        self._start_timer()
        return retired

    def _clear_seats(self) -> list[Request]:
        """The whole batch once its last member is done; nobody before."""
        if not all(request.is_terminal for request in self.active):
            return []
        done, self.active = self.active, []
        return done

    def admit(self, pool: SchedulerPool) -> None:
        """Form a batch, if none runs and it is time."""
        if not self.active and self._is_due(self.clock()):
            self._fill_seats(pool)
            self._forming_since = None

    def plan(self) -> StepPlan:
        """The whole rectangle: every member's prompt first, then every member's row in each step.

        Members that are done are named too: their rows are part of the rectangle.
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
        """An idle engine with someone waiting begins to form a batch; without anyone it stops."""
        if self.active or not self.waiting:
            self._forming_since = None
        elif self._forming_since is None:
            self._forming_since = self.clock()

    def _is_due(self, now: float) -> bool:
        """Whether those who wait are a full batch, or have waited for company long enough."""
        return len(self.waiting) >= self.config.max_batch_size or (
            self._forming_since is not None and now >= self._deadline()
        )

    def _deadline(self) -> float:
        """When the batch that is forming begins, full or not, on the engine's clock."""
        assert self._forming_since is not None
        return self._forming_since + self.batch_wait_timeout_s
