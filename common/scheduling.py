"""What a scheduler decides and how it says so: the contract between engine, scheduler and runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from common.kv import KVPool
from common.request import Request


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`request.token_ids[start:end]`, to be computed in this step."""

    request: Request
    start: int
    end: int

    @classmethod
    def rest(cls, request: Request) -> PrefillChunk:
        """All that is still to be computed before the next token."""
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
    """An immutable snapshot of what one step computes."""

    decode: tuple[Request, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()


class Scheduler(ABC):
    """Who runs when. Only a scheduler reserves KV memory and preempts; it never touches a tensor.

    A step calls `retire`, `make_room`, `admit` and `plan`, in that order.
    """

    preemptions = 0  # since the start
    waiting: Sequence[Request]  # not admitted yet, or not again; whoever is first in line in front

    @abstractmethod
    def add_request(self, request: Request) -> bool:
        """Queue a request. False: the queue is full, nothing has changed."""

    @abstractmethod
    def queue_room(self) -> int:
        """How many more requests `add_request` would take now. Any thread may ask."""

    @abstractmethod
    def retire(self) -> list[Request]:
        """Let go of requests that are done for good; their memory is released next."""

    @abstractmethod
    def make_room(self, pool: KVPool) -> None:
        """One more column for every decoding request, oldest first, preempting the latest arrivals if need be."""

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
