"""Decides which guesses are worth their rows, by the cost of a row and by how many guesses came true so far.

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
from collections.abc import Sequence

from common.engine.scheduling import RowCost
from common.request import Request
from phase10_speculative.drafters import Drafter

FORCED = 0  # stands for the length of a match, for tokens that a grammar forces
LONGEST_MATCH = 8  # longer matches count as this long
START = (0.95, *[0.5] * LONGEST_MATCH)  # how often guesses come true, by the length of their match, at first
PACE = 0.1  # weight of a new guess in a running mean
LEAST_GAIN = 1.05  # least ratio of tokens/s with guesses to tokens/s without: less may be an estimate's error


class Guesser:
    """Guesses one request's tokens, and says how likely each guess is to come true.

    Guesses are compared with the tokens that come, up to the first wrong guess, whether or not they were
    computed. For each length of the match that a guess follows, a running mean says which share of the
    guesses comes true.

    Args:
        request: the request whose tokens are guessed.
        drafter: proposes the guesses.
        rates: the running means of all requests, to start from and to keep up to date.

    Attributes:
        guesses: the guessed tokens after the latest token that the host knows. The first guesses stand for tokens
            in flight.
    """

    def __init__(self, request: Request, drafter: Drafter, rates: list[float]) -> None:
        self.guesses: list[int] = []
        self._request, self._drafter = request, drafter
        self._rates, self._everyone = rates.copy(), rates
        self._matches: list[int] = []  # the length of the match that each guess follows
        self._known = 0

    def guess(self, limit: int) -> list[float]:
        """Compare earlier guesses with the tokens that came. Guess the tokens in flight and `limit` more.

        Returns:
            For each guess after the tokens in flight: how likely it and all guesses before it come true.
        """
        known, pending = self._request.token_ids, self._request.pending_tokens
        for length, guess, token_id in zip(self._matches, self.guesses, known[self._known :], strict=False):
            for means in (self._rates, self._everyone):
                means[length] += PACE * ((guess == token_id) - means[length])
            if guess != token_id:
                break
        self._known, self.guesses, forced = len(known), [], False
        self.guesses = self._drafter.propose(known, limit + pending)
        if (matcher := self._request.matcher) is not None:
            self.guesses, forced = matcher.revise(self.guesses, limit + pending)
        lengths = itertools.count(self._drafter.matched)
        self._matches = [FORCED if forced else min(next(lengths), LONGEST_MATCH) for _ in self.guesses]
        rates = (self._rates[each] for each in self._matches)
        return list(itertools.accumulate(rates, operator.mul))[pending:]


def worthwhile(
    guesses: Sequence[Sequence[float]], rows: int, spare_rows: int, cost: RowCost | None
) -> list[int]:
    """Return how many guesses of each sequence to compute: the likeliest of all sequences.

    Args:
        guesses: for each sequence that gets a token, the probabilities that its guesses come true, descending.
        rows: rows of the step without guesses.
        spare_rows: how many guesses to compute at most.
        cost: choose only guesses that raise the tokens a second, and none if all together raise them by less
            than `LEAST_GAIN`. None: choose as many as there are spare rows.
    """
    likeliest = sorted(((p, i) for i, each in enumerate(guesses) for p in each), key=lambda each: -each[0])
    del likeliest[max(0, spare_rows) :]
    counts, (weights, host) = [0] * len(guesses), cost or RowCost()
    gained, time = float(len(guesses)), weights + host + rows
    for p, i in likeliest:
        if cost and p * time <= gained:
            break
        counts[i] += 1
        gained, time = gained + p, time + 1
    if cost and gained * (weights + rows) <= LEAST_GAIN * len(guesses) * time:
        return [0] * len(guesses)
    return counts
