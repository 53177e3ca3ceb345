"""The choice of guesses, by the cost of a row and by the share of accepted guesses."""

from __future__ import annotations

import pytest

from common.engine.scheduling import RowCost
from common.request import Request, SamplingParams
from phase10_speculative.payoff import LEAST_GAIN, START, Guesser, worthwhile

CHEAP = RowCost(weights=100.0, host=1.0)
DEAR = RowCost(weights=0.1, host=0.1)


def yield_of(cost: RowCost, tokens: int, guesses: list[list[float]], counts: list[int]) -> float:
    """Return the expected tokens of a step per time of a row, with `counts` guesses of the sequences."""
    gained = tokens + sum(sum(own[:count]) for own, count in zip(guesses, counts, strict=False))
    return gained / (cost.weights + (cost.host if any(counts) else 0) + tokens + sum(counts))


@pytest.mark.parametrize(("cost", "expected"), [(CHEAP, [3, 2]), (DEAR, [0, 0])])
def test_guesses_are_computed_where_rows_are_cheap(cost: RowCost, expected: list[int]) -> None:
    guesses = [[0.9, 0.8, 0.7], [0.5, 0.25]]
    assert worthwhile(guesses, 2, 64, cost) == expected


@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("cost", [RowCost(), CHEAP, DEAR, RowCost(10.0, 8.0)])
def test_no_other_number_of_guesses_has_a_higher_yield(cost: RowCost, rate: float, tokens: int) -> None:
    guesses = [[rate ** (1 + i) for i in range(8)] for _ in range(tokens)]
    counts = worthwhile(guesses, tokens, 1000, cost)
    best = yield_of(cost, tokens, guesses, counts) * (1 if any(counts) else LEAST_GAIN)
    for other in range(9):
        assert yield_of(cost, tokens, guesses, [other] * tokens) <= best + 1e-12


def test_a_budget_goes_to_the_likeliest_whether_they_pay_or_not() -> None:
    guesses = [[0.2, 0.1], [0.9, 0.8, 0.7]]
    assert worthwhile(guesses, 2, 3, None) == [0, 3]
    assert worthwhile(guesses, 2, 4, None) == [1, 3]
    assert worthwhile(guesses, 9, -3, None) == [0, 0]


class Sequence:
    """A request whose guesses are always the token 1, and whose tokens are 1 or 0."""

    def __init__(self, rates: list[float] | None = None) -> None:
        self.request = Request("request", [0], SamplingParams())
        self.matched = 0
        self.guesser = Guesser(self.request, self, [*START] if rates is None else rates)

    def propose(self, token_ids: object, limit: int) -> list[int]:
        return [1] * limit

    def likely(self, matched: int, count: int) -> list[float]:
        self.matched = matched
        return self.guesser.guess(count)

    def observe(self, matched: int, right: bool) -> None:
        for _ in range(50):
            self.likely(matched, 1)
            self.request.token_ids.append(right)


def test_rates_follow_the_accepted_guesses_of_each_length_of_match() -> None:
    sequence = Sequence()
    sequence.observe(2, False)
    sequence.observe(5, True)
    assert sequence.likely(2, 1)[0] < 0.1
    assert sequence.likely(5, 1)[0] > 0.9
    assert sequence.likely(9, 1) == [0.5], "no long match was seen"


def test_a_request_starts_from_the_rates_of_all() -> None:
    everyone = [*START]
    Sequence(everyone).observe(3, True)
    assert Sequence(everyone).likely(3, 1)[0] > 0.9


def test_a_guess_comes_true_only_with_all_before_it() -> None:
    assert Sequence().likely(20, 3) == [0.5, 0.25, 0.125]
    ahead = Sequence()
    ahead.request.pending_tokens = 1
    assert ahead.likely(20, 2) == [0.25, 0.125], "the first token is in flight"


def test_guesses_behind_a_wrong_one_are_not_counted() -> None:
    sequence = Sequence()
    sequence.likely(4, 3)
    sequence.request.token_ids += [0, 1, 1]
    assert sequence.likely(4, 1)[0] < 0.5
    assert sequence.likely(5, 1) == [0.5]
