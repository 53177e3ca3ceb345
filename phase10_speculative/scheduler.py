"""Phase 9's schedule, with guesses beside the tokens that are certain.

```text
step        t            t+1                 t+2         t+3
            runs ahead   runs ahead          a verify step, committed before t+3 is planned
plan              no guess pays   guesses pay:
                                  nothing is planned
                                  until t+1 is read
```

A guess needs the latest token on the host, so a step with guesses cannot run ahead. Guesses are also made, and
compared with the tokens that come, while they do not pay. So guessing pauses by itself where it fails, at no cost,
and starts again where it would have succeeded.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

from common.kv import SchedulerPool
from common.request import Request
from common.scheduling import Clock, RowCost, StepPlan
from phase9_pipelined.scheduler import PipelinedScheduler
from phase10_speculative.config import MOST_ROWS, Config
from phase10_speculative.drafters import Dictionary, Drafter, NgramDrafter
from phase10_speculative.yields import Rates, worthwhile

logger = logging.getLogger(__name__)

FORCED = 0  # the "match" of tokens that a grammar forces
MOST_SALTS = 8  # cache salts with a dictionary; the longest unused one is dropped


class Guesser:
    """Guesses one request's tokens, and compares earlier guesses with the tokens that came.

    Attributes:
        guesses: of the tokens after those that are known.
        likely: how likely each guess that can be computed is to come true, with all before it.
    """

    def __init__(self, request: Request, drafter: Drafter, rates: Rates) -> None:
        self.request = request
        self.guesses: list[int] = []
        self.likely: list[float] = []
        self._drafter = drafter
        self._rates = rates
        self._matched = self._known = 0

    def guess(self, limit: int) -> None:
        """Guess up to `limit` tokens that follow the request's known and pending tokens."""
        known, pending = self.request.token_ids, self.request.pending_tokens
        for i, (guess, token_id) in enumerate(zip(self.guesses, known[self._known :], strict=False)):
            self._rates.observe(self._matched + i if self._matched else FORCED, guess == token_id)
            if guess != token_id:
                break
        self._known, self.likely = len(known), []
        self.guesses = self._drafter.propose(known, limit + pending)
        self._matched = self._drafter.matched
        if (matcher := self.request.matcher) is not None:
            forced = matcher.forced()[: limit + pending]
            if forced != self.guesses[: len(forced)]:
                self.guesses, self._matched = forced, FORCED
            else:
                self.guesses = self.guesses[: matcher.allowed(self.guesses)]
        self.likely = self._rates.probabilities(self._matched, len(self.guesses))[pending:]


class SpeculativeScheduler(PipelinedScheduler):
    """Phase 9's scheduler. It guesses last: guesses take no memory that a request waits for."""

    config: Config

    def __init__(self, config: Config, clock: Clock) -> None:
        super().__init__(config, clock)
        self.row_cost = RowCost() if config.draft_length and config.draft_rows is None else None
        self._rates = Rates()
        self._texts = functools.lru_cache(MOST_SALTS)(lambda _: Dictionary())  # of finished requests
        self._guessers: dict[Request, Guesser] = {}
        self._planned = StepPlan()

    def new_drafter(self, request: Request) -> Drafter:
        shared = self._texts(request.cache_salt) if self.config.draft_from_finished else None
        return NgramDrafter(request.prompt_token_ids, request.prediction, shared)

    def _clear_seats(self) -> list[Request]:
        cleared = super()._clear_seats()
        for request in cleared:
            if self._guessers.pop(request, None) and self.config.draft_from_finished:
                self._texts(request.cache_salt).add(request.token_ids)
        return cleared

    def admit(self, pool: SchedulerPool) -> None:
        super().admit(pool)
        self._planned = super().plan()
        if self.config.draft_length and self._planned.decode:
            self._planned = self._with_guesses(self._planned, pool)

    def plan(self) -> StepPlan:
        return self._planned

    def _with_guesses(self, plan: StepPlan, pool: SchedulerPool) -> StepPlan:
        """Choose the guesses that a plan computes, and reserve their columns. Returns the plan: requests without
        guesses first, and nothing if tokens in flight must be read before.
        """
        rows = len(plan.decode) + sum(chunk.end - chunk.start for chunk in plan.prefill)
        most_rows = self.config.draft_rows or MOST_ROWS
        if rows >= most_rows:
            return plan
        guessers = [guesser for request in plan.decode if (guesser := self._guess(request))]
        counts = worthwhile(
            [each.likely for each in guessers], len(plan.decode), rows, most_rows, self.row_cost
        )
        if not any(counts):
            return plan
        if self.in_flight:
            return StepPlan()
        for guesser, count in zip(guessers, counts, strict=True):
            request, fitting = guesser.request, self._fitting(pool, guesser.request, count)
            if fitting and pool.reserve(request, request.num_tokens + fitting):
                request.guess(guesser.guesses[:fitting])
        decode = sorted(plan.decode, key=lambda request: bool(request.drafts))
        return dataclasses.replace(plan, decode=tuple(decode), verifies=bool(decode[-1].drafts))

    def _guess(self, request: Request) -> Guesser | None:
        """Guess a request's next tokens. Returns its guesser; None if guessing failed."""
        missing = request.max_total_tokens - request.num_tokens - 1  # beside the token that is certain
        try:
            if request not in self._guessers:
                self._guessers[request] = Guesser(request, self.new_drafter(request), Rates(self._rates))
            self._guessers[request].guess(min(self.config.draft_length, missing))
        except Exception as error:  # a drafter's failure must not cost a request its answer
            self.failed_drafters += 1
            logger.warning("no guesses for request %s: %r", request.request_id, error)
            return None
        return self._guessers[request]

    def _fitting(self, pool: SchedulerPool, request: Request, count: int) -> int:
        """Return how many of `count` guesses get columns: those in the request's last block, if memory is so short
        that other requests may soon need the free blocks."""
        free, block_size = pool.free_token_capacity(), self.config.block_size
        if free is None or free > count + block_size * (len(self.active) + len(self.waiting)):
            return count
        return min(count, -request.num_tokens % block_size)
