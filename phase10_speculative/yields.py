"""Decides which guesses are worth their rows, by what a row costs and by how many guesses came true so far.

```text
seconds of a pass      ┌ reading the weights: as long as `weights` rows take        `weights` and `host` are
  = a row's time × ( weights + rows + host )                                         measured when the server starts
                                      └ tokens are read before the next step is planned: phase 9 hides this time
```

A step gives a token for each sequence, and one more for each guess that comes true. A further guess with
probability p pays if it raises the tokens a second: p more tokens for one row more.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LONGEST_MATCH = 8  # longer matches count as this long
START = (0.95, *[0.5] * LONGEST_MATCH)  # rates by length of match; 0: a grammar forces the guess
PRIOR = 3.0  # observations that a rate starts with
KEPT = 0.95  # weight of older observations at each new one
LEAST_GAIN = 1.05  # tokens a second with guesses by those without: less may be an error of the estimate


class RowCost(NamedTuple):
    """The time of a step beside its rows, in times of a row. The defaults are a small model's on two cores."""

    weights: float = 20.0
    host: float = 2.0


class Rates:
    """How often guesses came true, by the length of the match that they go on from.

    Args:
        prior: rates to start from; None: one half, and nearly 1 for tokens that a grammar forces.
    """

    def __init__(self, prior: Rates | None = None) -> None:
        self._prior = prior
        self._right = [0.0] * (LONGEST_MATCH + 1)
        self._seen = [0.0] * (LONGEST_MATCH + 1)
        self._rates: list[float] = list(START) if prior is None else prior._rates.copy()

    def observe(self, matched: int, right: bool) -> None:
        """Count a guess that came true, or did not. `matched`: its match's length; 0: a grammar forced it."""
        i = min(matched, LONGEST_MATCH)
        start = START[i]
        if self._prior is not None:
            self._prior.observe(i, right)
            start = self._prior._rates[i]
        self._right[i] = KEPT * self._right[i] + right
        self._seen[i] = KEPT * self._seen[i] + 1
        self._rates[i] = (self._right[i] + PRIOR * start) / (self._seen[i] + PRIOR)

    def probabilities(self, matched: int, pending: int, count: int) -> list[float]:
        """Return for guesses after a match how likely each is to come true together with all before it.

        Args:
            matched: length of the match; 0: a grammar forces the guesses.
            pending: how many first guesses are left out, since their tokens are in flight.
            count: number of guesses, with the left out ones.
        """
        last = matched + count if matched else 0
        rates = [self._rates[min(i, LONGEST_MATCH, last)] for i in range(matched, matched + count)]
        return list(itertools.accumulate(rates, operator.mul))[pending:]


def worthwhile(
    cost: RowCost, tokens: int, rows: int, most_rows: int, guesses: Iterable[Sequence[float]], *, pays: bool
) -> list[int]:
    """Return how many guesses of each sequence to compute.

    Args:
        cost: of a row.
        tokens: sequences that get a token in this step.
        rows: rows of the step without guesses.
        most_rows: rows of the step with guesses, at most.
        guesses: for each sequence, how likely each of its guesses is to come true, in descending order.
        pays: compute only guesses that raise the tokens a second.
    """
    likeliest = sorted(
        ((p, i) for i, probabilities in enumerate(guesses) for p in probabilities), key=lambda each: -each[0]
    )
    counts: dict[int, int] = {}
    gained, time = float(tokens), cost.weights + cost.host + rows
    for p, i in likeliest[: max(0, most_rows - rows)]:
        if pays and p * time <= gained:
            break
        counts[i] = counts.get(i, 0) + 1
        gained, time = gained + p, time + 1
    if pays and gained * (cost.weights + rows) <= LEAST_GAIN * tokens * time:
        return []
    return [counts.get(i, 0) for i in range(max(counts, default=-1) + 1)]
