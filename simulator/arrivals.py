"""Who comes when, and with what."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.workloads import PlannedRequest


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come.

    Attributes:
        index: its place among all; requests are told apart by it.
        at_s: when it is sent; with `after`, how long after that one's answer.
        prompt: token ids. Only which prompts begin alike matters, so any numbers do.
        new_tokens: how many it asks for, and gets.
        after: index of one that must have been answered before.
        continues: its prompt begins with the prompt and the answer of `after`.
    """

    index: int
    at_s: float
    prompt: Sequence[int]
    new_tokens: int
    after: int | None = None
    continues: bool = False


class Unlike:
    """Writes prompts of which no two have anything in common, in place of `benchmarks.workloads.PromptWriter`."""

    def __init__(self) -> None:
        self._next = 1

    def write(self, rng: random.Random, tokens: int, *, continues: bool = False) -> list[int]:  # noqa: ARG002
        first = self._next
        self._next += tokens
        return list(range(first, first + tokens))


def arrivals_of(plan: Sequence[PlannedRequest], *, sequential: bool = False) -> Iterator[Arrival]:
    """A benchmark's plan as the simulation takes it. `sequential`: each is sent when the one before is answered."""
    for planned in plan:
        assert not isinstance(planned.prompt, str)
        before = planned.index - 1 if sequential and planned.index else planned.follows
        yield Arrival(
            planned.index,
            planned.send_at_s,
            planned.prompt,
            planned.max_tokens,
            after=before,
            continues=planned.follows is not None,
        )
