"""What a scheduler decides and how it says so: the contract between engine, scheduler and runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from common.kv import KVPool
from common.request import Request


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The part `token_ids[start:end]` of a request's tokens, to be computed in this step."""

    request: Request
    start: int
    end: int

    @classmethod
    def rest(cls, request: Request) -> PrefillChunk:
        """Return the chunk of all tokens that are still to be computed before the next one is sampled."""
        return cls(request, request.prefill_progress, len(request.token_ids))

    @property
    def token_ids(self) -> list[int]:
        return self.request.token_ids[self.start : self.end]

    @property
    def is_first(self) -> bool:
        """Whether nothing of the request was computed before, in this admission or an earlier one."""
        return self.start == self.request.prefill_start and not self.request.preempted

    @property
    def is_last(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.end == len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The requests and chunks that one step computes. The plan does not change; its requests do: one may be
    cancelled while the step computes.
    """

    decode: tuple[Request, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()


class Scheduler(ABC):
    """Decides which requests run in a step, reserves their KV memory and preempts. Computes with integers only.

    A step calls `retire`, `make_room`, `admit` and `plan`, in that order. The engine releases the memory of the
    requests that `retire` and `make_room` return.
    """

    preemptions = 0  # since the start
    waiting: Sequence[Request]  # not admitted yet, or preempted; the first in line in front

    @abstractmethod
    def add_request(self, request: Request) -> bool:
        """Queue a request. False: the queue is full, nothing has changed."""

    @abstractmethod
    def queue_room(self) -> int:
        """How many more requests `add_request` would take now. Any thread may ask."""

    @abstractmethod
    def retire(self) -> list[Request]:
        """Remove and return the requests that have ended; the engine releases their memory next."""

    @abstractmethod
    def make_room(self, pool: KVPool) -> list[Request]:
        """Reserve one more column for every decoding request, oldest first.

        Returns the requests that were preempted for it. The engine releases their memory and calls again, until
        the list is empty.
        """

    @abstractmethod
    def admit(self, pool: KVPool) -> None:
        """Move waiting requests to PREFILL as far as seats and memory go."""

    @abstractmethod
    def plan(self) -> StepPlan:
        """What this step computes. Changes nothing."""

    @abstractmethod
    def next_wake(self, now: float) -> float | None:
        """When a step has something to do: `now` or earlier for at once, later if only time must pass,
        None if nothing will happen without new requests."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether any request is waiting or active."""

    @property
    @abstractmethod
    def num_waiting(self) -> int: ...

    @property
    @abstractmethod
    def active(self) -> list[Request]:
        """Requests that were admitted and not yet retired, in order of admission."""
