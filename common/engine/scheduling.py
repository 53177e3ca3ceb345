"""The contract between engine, scheduler and runner: which requests a step computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from common.engine.config import EngineConfig
from common.request import Request

if TYPE_CHECKING:  # it imports torch
    from common.kv import SchedulerPool

Clock = Callable[[], float]  # seconds; only differences matter


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The part `token_ids[start:end]` of a request's tokens, to be computed in one step."""

    request: Request
    start: int
    end: int

    @classmethod
    def rest(cls, request: Request) -> PrefillChunk:
        """Return the chunk of all tokens that must still be computed before the next token can be sampled."""
        return cls(request, request.prefill_progress, len(request.token_ids))

    @property
    def token_ids(self) -> list[int]:
        return self.request.token_ids[self.start : self.end]

    @property
    def is_first(self) -> bool:
        """Whether nothing of the request was computed before, in this admission or an earlier one."""
        return self.start == self.request.prefill_start and not self.request.recomputes

    @property
    def is_last(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.end == len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The requests and chunks that one step computes. A request that is cancelled while the step computes stays in
    the plan.

    Attributes:
        decode: requests whose next token is computed. (In phase 4 also ended requests, whose rows are idle.)
        prefill: parts of prompts, and after a preemption of generated tokens, that are computed.
        verifies: whether guesses of next tokens are computed, too (phase 10).
    """

    decode: tuple[Request, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    verifies: bool = False

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests that the step computes for."""
        return (*self.decode, *[chunk.request for chunk in self.prefill])

    def without_ended(self) -> StepPlan:
        """Return a plan with the same work, except for requests that have ended since."""
        return replace(
            self,
            decode=tuple(request for request in self.decode if not request.is_terminal),
            prefill=tuple(chunk for chunk in self.prefill if not chunk.request.is_terminal),
        )


MOST_WEIGHTS = 256.0  # bound of `RowCost.weights`: beyond it, the time of a row cannot be told from noise


class RowCost(NamedTuple):
    """The fixed time of a decode step, as a multiple of the time that each row (token) adds.

    The defaults are those of a small model on two cores.

    Attributes:
        weights: the time to read all weights.
        host: the host's time. It is hidden if the step runs ahead (phase 9).
    """

    weights: float = 20.0
    host: float = 2.0

    @classmethod
    def of(cls, one_s: float, many_s: float, rows: int, host_s: float) -> RowCost:
        """Return the cost, from the seconds `one_s` of a step of one row and `many_s` of a step of `rows` rows. In
        each step, the host works for `host_s` seconds."""
        row_s = max((many_s - one_s) / (rows - 1), one_s / MOST_WEIGHTS)
        return cls(weights=max(1.0, (one_s - host_s) / row_s - 1), host=host_s / row_s)


class Scheduler(ABC):
    """Decides which requests run in a step, reserves their KV memory and preempts. Computes without tensors.

    A step calls `retire`, `make_room`, `admit` and `plan`, in that order, or only `retire` while the engine is
    paused. The engine releases the memory of the requests that `retire` and `make_room` return.

    Requests wait in a queue for one of `max_batch_size` seats (places in the batch). `queue_room` limits the queue.
    Preempted requests go first, then the others by their `rank`: first come, first served among requests of the
    same priority. A request may starve: it waits as long as requests of a lower priority number keep coming.

    A phase decides when seats are filled (`admit`), when they are cleared (`_clear_seats`), and which tokens of the
    seated requests a step computes (`plan`).

    Attributes:
        has_priorities: whether requests may have a priority.
        waiting: requests that are not admitted yet, or preempted; the first in line in front.
        active: requests that have a seat, in order of admission.
        preemptions: how many requests were preempted since the start.
        failed_drafters: how many times guessing a request's tokens failed since the start (phase 10).
        row_cost: the fixed time of a step in units of a row's time; the warm-up may measure it. None: the scheduler
            does not use it.
    """

    has_priorities: ClassVar[bool] = True
    row_cost: RowCost | None = None

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self.preemptions = 0
        self.failed_drafters = 0

    # ------------------------------------------------------------------ the queue

    def add_request(self, request: Request) -> bool:
        """Queue a request. Returns False, and changes nothing, if the queue is full."""
        if self.queue_room() < 1:
            return False
        place = len(self.waiting)
        while (
            place
            and self.waiting[place - 1].priority > request.priority
            and not self.waiting[place - 1].preemptions
        ):
            place -= 1
        self.waiting.insert(place, request)
        return True

    def queue_room(self) -> int:
        """Return how many more requests `add_request` would take now; 0 or less: none. Any thread may ask."""
        return self.config.max_waiting_requests - len(self.waiting)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or active."""
        return bool(self.waiting or self.active)

    def next_wake(self, now: float) -> float | None:
        """Return when the next step has something to do, on the scheduler's clock: `now` if there is work already.
        None: not before a request is added."""
        return now if self.has_work else None

    # ------------------------------------------------------------------ a step

    def retire(self) -> list[Request]:
        """Remove and return ended requests: all that waited, and the active ones that `_clear_seats` removes.

        The engine releases their memory next.
        """
        cancelled = [request for request in self.waiting if request.is_terminal]
        if cancelled:
            self.waiting = deque(request for request in self.waiting if not request.is_terminal)
        return cancelled + self._clear_seats()

    @abstractmethod
    def _clear_seats(self) -> list[Request]:
        """Remove the active requests that may leave now from `active`, and return them."""

    def make_room(self, pool: SchedulerPool) -> list[Request]:
        """Preempt requests to free seats or memory for others. Returns the preempted requests.

        The engine releases their memory and calls this method again, until the list is empty. This base class frees
        a seat of a group that holds more than its share of the seats (`_over_share`). From phase 6 on, memory is
        freed, too.
        """
        greediest = self._over_share(pool)
        return [] if greediest is None else self._make_way(greediest)

    def _make_way(self, request: Request) -> list[Request]:
        """Preempt a request and return it, in a list. The request goes to the front of the queue and keeps its
        generated tokens, so its client sees only a pause."""
        self.active.remove(request)
        request.preempt()
        self.waiting.appendleft(request)
        self.preemptions += 1
        return [request]

    @abstractmethod
    def admit(self, pool: SchedulerPool) -> None:
        """Admit waiting requests while seats and memory are free: reserve their memory and move them to PREFILL."""

    @abstractmethod
    def plan(self) -> StepPlan:
        """Return the plan of this step: the tokens that it computes. Changes nothing."""

    # ------------------------------------------------------------------ the seats

    @property
    def free_seats(self) -> int:
        return self.config.max_batch_size - len(self.active)

    def _fill_seats(self, pool: SchedulerPool) -> None:
        """Give seats to waiting requests, in order. Stops at the first request that finds no seat or no memory."""
        while (request := self.next_waiting()) and self._seat(request, pool):
            pass

    def next_waiting(self) -> Request | None:
        """Return the waiting request that gets a seat next; None if no seat is free or no request waits.

        This is the first in the queue. But if its group holds its share of the seats, requests of other groups go
        first.
        So the 32 choices of one answer do not take every seat while other clients wait.
        """
        if not self.waiting or self.free_seats < 1:
            return None
        first = self.waiting[0]
        if first.group and (entitled := self._entitled()):
            return entitled[0]
        return first

    def _over_share(self, pool: SchedulerPool) -> Request | None:
        """Return the request that must give up its seat, since its group holds more than its share; else None.

        A group may take many seats while no other request waits. Without preemption it would keep them until its
        answers are complete. If no seat is free, the last in line of the requests of all such groups gives up its
        seat, for the first of the waiting requests that `_entitled` returns. If that request would find no memory,
        no seat is given up.
        """
        if self.free_seats > 0 or not any(request.group for request in self.active):
            return None
        entitled = self._entitled()
        if not entitled:
            return None
        share, held = self._share(), self._held()
        over = [r for r in self.active if r.group and held[r.group] > share and not r.is_terminal]
        last = max(over, key=lambda request: request.rank, default=None)
        return last if last is not None and self._fits_instead(entitled[0], last, pool) else None

    def _fits_instead(self, waiting: Request, active: Request, pool: SchedulerPool) -> bool:  # noqa: ARG002 - phase 6
        """Return whether a waiting request finds memory once an active one is preempted. Here it always does."""
        return True

    def _entitled(self) -> list[Request]:
        """Return the waiting requests without a group, and those of groups with less than their share."""
        share, held = self._share(), self._held()
        return [request for request in self.waiting if not request.group or held[request.group] < share]

    def _share(self) -> int:
        """Return how many seats one group may hold while others wait: seats divided by groups, at least 1.

        Only groups with active or waiting requests count. A request without a group counts as a group.
        """
        groups = {request.group or request.request_id for request in (*self.active, *self.waiting)}
        return max(1, self.config.max_batch_size // len(groups))

    def _held(self) -> Counter[str]:
        """Return how many seats each group holds. Requests without a group are left out."""
        return Counter(request.group for request in self.active if request.group)

    def _seat(self, request: Request, pool: SchedulerPool) -> bool:
        """Reserve memory for a waiting request and make it active. Returns False if memory is short."""
        if not pool.reserve(request, len(request.token_ids)):
            return False
        self.waiting.remove(request)
        request.start_prefill()
        self.active.append(request)
        return True
