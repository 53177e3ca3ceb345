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

from abc import abstractmethod
from collections import Counter, deque

from common.config import EngineConfig
from common.engine import Clock
from common.kv import KVPool
from common.request import Request, RequestState
from common.scheduling import PrefillChunk, Scheduler, StepPlan
from phase4_static.config import Config


class SeatingScheduler(Scheduler):
    """First come, first served: a queue of `max_waiting_requests`, and `max_batch_size` seats for those who run.

    How seats are filled and cleared is what its subclasses differ in.
    """

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        self.waiting: deque[Request] = deque()
        self._active: list[Request] = []

    # ------------------------------------------------------------------ the queue

    def add_request(self, request: Request) -> bool:
        if self.queue_room() < 1:
            return False
        self.waiting.append(request)
        return True

    def queue_room(self) -> int:
        return self.config.max_waiting_requests - len(self.waiting)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def active(self) -> list[Request]:
        return self._active

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self._active)

    def _drop_waiting(self) -> list[Request]:
        """Requests that ended (cancelled, failed) before they were admitted."""
        dropped = [request for request in self.waiting if request.is_terminal]
        if dropped:
            self.waiting = deque(request for request in self.waiting if not request.is_terminal)
        return dropped

    # ------------------------------------------------------------------ the seats

    def retire(self) -> list[Request]:
        return self._drop_waiting() + self._take_out_done()

    @abstractmethod
    def _take_out_done(self) -> list[Request]:
        """Members that are done and may leave now."""

    def make_room(self, pool: KVPool) -> list[Request]:  # noqa: ARG002 - a seat comes with all the memory it needs
        """Preempt nobody: all that a request can need is reserved when it gets its seat."""
        return []

    def _fill_seats(self, pool: KVPool) -> None:
        """Seat waiting requests. Stops at the first request that finds no seat or no memory."""
        while (request := self.next_waiting()) and self._seat(request, pool):
            self.waiting.popleft()

    def next_waiting(self) -> Request | None:
        """Bring the next request to the front of the queue and return it; None if no seat is free or none waits.

        First come, first served, except that a group which holds its share of the seats lets others go first. So
        the 32 choices of one answer do not take every seat while other clients wait.
        """
        if not self.waiting or self.free_seats < 1:
            return None
        first = self.waiting[0]
        if not first.group or first.preempted:
            return first
        held = Counter(request.group for request in self._active)
        groups = {request.group or request.request_id for request in (*self._active, *self.waiting)}
        share = max(1, self.config.max_batch_size // len(groups))
        for place, request in enumerate(self.waiting):
            if not request.group or held[request.group] < share:
                del self.waiting[place]
                self.waiting.appendleft(request)
                return request
        return first

    @property
    def free_seats(self) -> int:
        return self.config.max_batch_size - len(self._active)

    def _seat(self, request: Request, pool: KVPool) -> bool:
        """Give a request its memory and make it active; False if there is not enough."""
        if not pool.reserve(request, len(request.token_ids)):
            return False
        request.start_prefill()
        self._active.append(request)
        return True


class StaticScheduler(SeatingScheduler):
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

    def _take_out_done(self) -> list[Request]:
        """The whole batch once its last member is done; nobody before."""
        if not all(request.is_terminal for request in self._active):
            return []
        done, self._active = self._active, []
        return done

    def admit(self, pool: KVPool) -> None:
        """Form a batch, if none runs and it is time."""
        if not self._active and self._is_due(self.clock()):
            self._fill_seats(pool)
            self._forming_since = None

    def plan(self) -> StepPlan:
        """The whole rectangle: every member's prompt first, then every member's row in each step.

        Members that are done are named too: their rows are part of the rectangle.
        """
        if any(request.state is RequestState.PREFILL for request in self._active):
            return StepPlan(prefill=tuple(PrefillChunk(r, 0, len(r.token_ids)) for r in self._active))
        return StepPlan(decode=tuple(self._active))

    # ------------------------------------------------------------------ time

    def next_wake(self, now: float) -> float | None:
        if self._active:
            return now
        if not self.waiting:
            return None
        return now if self._is_due(now) else self._deadline()

    def _start_timer(self) -> None:
        """An idle engine with someone waiting begins to form a batch; without anyone it stops."""
        if self._active or not self.waiting:
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
