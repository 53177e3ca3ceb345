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
        index: the request's number, which identifies it.
        at_s: when the request is sent, in seconds from the start; with `after`, from the end of that answer.
        prompt: token ids. Only their equality matters: prompts that begin alike may share blocks.
        new_tokens: the number of tokens that the request asks for and gets.
        after: the index of the request whose answer must end first; None: no such request.
        continues: whether the prompt and the answer of `after` are put before `prompt`.
    """

    index: int
    at_s: float
    prompt: Sequence[int]
    new_tokens: int
    after: int | None = None
    continues: bool = False


class Unlike:
    """Writes prompts no two of which share a token id. An instance is called in place of `PromptWriter.write`,
    which writes English."""

    def __init__(self) -> None:
        self._next = 1

    def __call__(self, rng: random.Random, tokens: int, *, continues: bool = False) -> list[int]:  # noqa: ARG002
        first = self._next
        self._next += tokens
        return list(range(first, self._next))


def arrivals_of(plan: Iterable[PlannedRequest], *, sequential: bool = False) -> Iterator[Arrival]:
    """Yield the requests of a benchmark's plan as arrivals.

    Args:
        plan: the requests, in the order of their `index`.
        sequential: whether each request is sent when the answer to the request before it has ended.
    """
    for planned in plan:
        yield Arrival(
            planned.index,
            planned.send_at_s,
            planned.token_ids,
            planned.max_tokens,
            after=planned.index - 1 if sequential and planned.index else planned.follows,
            continues=planned.follows is not None,
        )
