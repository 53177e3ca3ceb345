"""The requests of a simulation: when each arrives, with which prompt."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.workloads import PlannedRequest


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that will arrive.

    Attributes:
        index: its place among all requests, which identifies it.
        at_s: when it is sent, in seconds from the start; with `after`, from the end of that request's answer.
        prompt: token ids. Only their equality matters: prompts that begin alike may share blocks.
        new_tokens: the number of tokens that it asks for and gets.
        after: the index of the request whose answer must end first; None: no such request.
        continues: whether its prompt begins with the prompt and the answer of `after`.
    """

    index: int
    at_s: float
    prompt: Sequence[int]
    new_tokens: int
    after: int | None = None
    continues: bool = False


class Unlike:
    """Writes prompts that have no token id in common. Replaces `PromptWriter.write`, which writes English."""

    def __init__(self) -> None:
        self._next = 1

    def __call__(self, rng: random.Random, tokens: int, *, continues: bool = False) -> list[int]:  # noqa: ARG002
        first = self._next
        self._next += tokens
        return list(range(first, self._next))


def arrivals_of(plan: Iterable[PlannedRequest], *, sequential: bool = False) -> Iterator[Arrival]:
    """Yield the arrivals of a benchmark's plan. `sequential`: each is sent when the one before it is answered."""
    for planned in plan:
        yield Arrival(
            planned.index,
            planned.send_at_s,
            planned.token_ids,
            planned.max_tokens,
            after=planned.index - 1 if sequential and planned.index else planned.follows,
            continues=planned.follows is not None,
        )
