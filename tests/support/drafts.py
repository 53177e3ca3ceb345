"""Drafters that may know the right answers, and engines that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from common.engine.engine import Engine
from common.request import Request
from phase10_speculative.drafters import Drafter
from phase10_speculative.scheduler import SpeculativeScheduler
from tests.support.engines import build

#: Gets a request, its tokens so far and a number of tokens; returns guesses of the next ones.
Guess = Callable[[Request, Sequence[int], int], list[int]]


class FixedDrafter:
    """A drafter that calls a function."""

    matched = 1

    def __init__(self, request: Request, guess: Guess) -> None:
        self._request = request
        self._guess = guess

    def propose(self, token_ids: Sequence[int], limit: int) -> list[int]:
        return self._guess(self._request, token_ids, limit)


def let_guess(engine: Engine, guess: Guess) -> None:
    """Make an engine of phase 10 guess by a function."""

    def new_drafter(request: Request) -> Drafter:
        return FixedDrafter(request, guess)

    assert isinstance(engine.scheduler, SpeculativeScheduler)
    engine.scheduler.new_drafter = new_drafter  # type: ignore[method-assign]


def guessing(guess: Guess, model: Any = None, **options: Any) -> Engine:
    """Return an engine that guesses by a function, and computes guesses whether they pay or not."""
    engine = build("phase10_speculative", model, **({"draft_rows": 64} | options))
    let_guess(engine, guess)
    return engine


def by_rule(rule: Callable[[list[int]], Any], wrong_at: Callable[[int], bool]) -> Guess:
    """Guess by the rule of a `RememberingModel`. The guesses at some places of the text are wrong."""

    def guess(_: Request, token_ids: Sequence[int], limit: int) -> list[int]:
        text = list(token_ids)
        guesses: list[int] = []
        for _ in range(limit):
            token = rule(text)
            right = token if isinstance(token, int) else 0
            guesses.append(right + 1 if wrong_at(len(text)) else right)
            text.append(right)
        return guesses

    return guess
