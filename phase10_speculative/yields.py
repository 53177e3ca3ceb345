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
from collections import Counter
from collections.abc import Sequence

from common.scheduling import RowCost

LONGEST_MATCH = 8  # longer matches count as this long
START = (0.95, *[0.5] * LONGEST_MATCH)  # rates by length of match; 0: a grammar forces the guess
PACE = 0.1  # weight of a new observation
LEAST_GAIN = 1.05  # tokens a second with guesses by those without: less may be an error of the estimate


class Rates:
    """How often guesses came true, by the length of the match that they go on from: running means.

    Args:
        everyone: the rates of all requests, to start from and to keep up to date.
    """

    def __init__(self, everyone: Rates | None = None) -> None:
        self._everyone = everyone
        self._rates: list[float] = [*START] if everyone is None else everyone._rates.copy()

    def observe(self, matched: int, right: bool) -> None:
        """Count a guess that came true, or did not. `matched`: its match's length; 0: a grammar forced it."""
        i = min(matched, LONGEST_MATCH)
        self._rates[i] += PACE * (right - self._rates[i])
        if self._everyone is not None:
            self._everyone.observe(i, right)

    def probabilities(self, matched: int, count: int) -> list[float]:
        """Return how likely each of `count` guesses after a match is to come true together with all before it."""
        last = LONGEST_MATCH if matched else 0
        rates = [self._rates[min(matched + i, last)] for i in range(count)]
        return list(itertools.accumulate(rates, operator.mul))


def worthwhile(
    guesses: Sequence[Sequence[float]], tokens: int, rows: int, most_rows: int, cost: RowCost | None
) -> list[int]:
    """Return how many guesses of each sequence to compute.

    Args:
        guesses: for each sequence, how likely each of its guesses is to come true, in descending order.
        tokens: sequences that get a token in this step, with or without guesses.
        rows: rows of the step without guesses.
        most_rows: rows of the step with guesses, at most.
        cost: compute only guesses that raise the tokens a second; None: compute as many as there may be rows.
    """
    likeliest = sorted(((p, i) for i, each in enumerate(guesses) for p in each), key=lambda each: -each[0])
    counts: Counter[int] = Counter()
    if cost is None:
        counts.update(i for _, i in likeliest[: max(0, most_rows - rows)])
        return [counts[i] for i in range(len(guesses))]
    gained, time = float(tokens), cost.weights + cost.host + rows
    for p, i in likeliest[: max(0, most_rows - rows)]:
        if p * time <= gained:
            break
        counts[i] += 1
        gained, time = gained + p, time + 1
    if gained * (cost.weights + rows) <= LEAST_GAIN * tokens * time:
        counts.clear()
    return [counts[i] for i in range(len(guesses))]
