"""Which guesses pay: by the cost of a row, and by how many came true."""

from __future__ import annotations

import pytest

from common.scheduling import RowCost
from phase10_speculative.yields import LEAST_GAIN, Rates, worthwhile

CHEAP = RowCost(weights=100.0, host=1.0)
DEAR = RowCost(weights=0.1, host=0.1)


def yield_of(cost: RowCost, tokens: int, guesses: list[list[float]], counts: list[int]) -> float:
    """Tokens in the time of a row, of a step with so many guesses of each sequence."""
    gained = tokens + sum(sum(own[:count]) for own, count in zip(guesses, counts, strict=False))
    return gained / (cost.weights + (cost.host if any(counts) else 0) + tokens + sum(counts))


@pytest.mark.parametrize(("cost", "expected"), [(CHEAP, [3, 2]), (DEAR, [0, 0])])
def test_guesses_are_computed_where_rows_are_cheap(cost: RowCost, expected: list[int]) -> None:
    guesses = [[0.9, 0.8, 0.7], [0.5, 0.25]]
    assert worthwhile(guesses, 2, 2, 64, cost) == expected


@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("cost", [RowCost(), CHEAP, DEAR, RowCost(10.0, 8.0)])
def test_no_other_number_of_guesses_has_a_higher_yield(cost: RowCost, rate: float, tokens: int) -> None:
    guesses = [[rate ** (1 + i) for i in range(8)] for _ in range(tokens)]
    counts = worthwhile(guesses, tokens, tokens, 1000, cost)
    best = yield_of(cost, tokens, guesses, counts) * (1 if any(counts) else LEAST_GAIN)
    for other in range(9):
        assert yield_of(cost, tokens, guesses, [other] * tokens) <= best + 1e-12


def test_a_budget_goes_to_the_likeliest_whether_they_pay_or_not() -> None:
    guesses = [[0.2, 0.1], [0.9, 0.8, 0.7]]
    assert worthwhile(guesses, 2, 2, 5, None) == [0, 3]
    assert worthwhile(guesses, 2, 2, 6, None) == [1, 3]
    assert worthwhile(guesses, 2, 9, 6, None) == [0, 0]


def test_rates_follow_what_comes_true_for_each_length_of_match() -> None:
    rates = Rates()
    for _ in range(50):
        rates.observe(2, False)
        rates.observe(5, True)
    low, high = rates.probabilities(2, 1)[0], rates.probabilities(5, 1)[0]
    assert low < 0.1
    assert high > 0.9
    assert rates.probabilities(9, 1) == [0.5], "no long match was seen"


def test_a_request_starts_from_the_rates_of_all() -> None:
    everyone = Rates()
    first = Rates(everyone)
    for _ in range(50):
        first.observe(3, True)
    assert Rates(everyone).probabilities(3, 1)[0] > 0.9


def test_a_guess_comes_true_only_with_all_before_it() -> None:
    rates = Rates()
    assert rates.probabilities(20, 3) == [0.5, 0.25, 0.125]
    assert rates.probabilities(0, 2) == [0.95, 0.95**2], "a grammar forces both"
