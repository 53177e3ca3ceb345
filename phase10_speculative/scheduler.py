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
import logging

from common.kv import SchedulerPool
from common.request import Request
from common.scheduling import Clock, StepPlan
from phase9_pipelined.scheduler import PipelinedScheduler
from phase10_speculative.config import MOST_ROWS, Config
from phase10_speculative.drafters import Drafter, NgramDrafter, SharedTexts
from phase10_speculative.yields import Rates, RowCost, worthwhile

logger = logging.getLogger(__name__)

FORCED = 0  # the "match" of tokens that a grammar forces


class Guesser:
    """Guesses one request's tokens, and compares earlier guesses with the tokens that came.

    Attributes:
        guesses: of the tokens after those that are known.
        likely: how likely each guess that can be computed is to come true, with all before it.
    """

    def __init__(self, drafter: Drafter, rates: Rates) -> None:
        self.guesses: list[int] = []
        self.likely: list[float] = []
        self._drafter = drafter
        self._rates = rates
        self._matched = self._known = 0

    def guess(self, request: Request, limit: int) -> None:
        """Guess up to `limit` tokens that follow the request's known and pending tokens."""
        known, pending = request.token_ids, request.pending_tokens
        for i, (guess, token_id) in enumerate(zip(self.guesses, known[self._known :], strict=False)):
            self._rates.observe(self._matched + i if self._matched else FORCED, guess == token_id)
            if guess != token_id:
                break
        self._known, self.likely = len(known), []
        self.guesses = self._drafter.propose(known, limit + pending)
        self._matched = self._drafter.matched
        if (matcher := request.matcher) is not None:
            forced = matcher.forced()[: limit + pending]
            if forced != self.guesses[: len(forced)]:
                self.guesses, self._matched = forced, FORCED
            else:
                self.guesses = self.guesses[: matcher.allowed(self.guesses)]
        self.likely = self._rates.probabilities(self._matched, pending, len(self.guesses))


class SpeculativeScheduler(PipelinedScheduler):
    """Phase 9's scheduler. It guesses last: guesses take no memory that a request waits for."""

    config: Config

    def __init__(self, config: Config, clock: Clock) -> None:
        super().__init__(config, clock)
        self.cost = RowCost()
        self._rates = Rates()
        self._texts = SharedTexts() if config.draft_from_finished else None
        self._guessers: dict[Request, Guesser] = {}
        self._reads_first = False  # whether this step plans nothing, since guesses need the tokens in flight

    def new_drafter(self, request: Request) -> Drafter:
        shared = self._texts.of(request) if self._texts is not None else None
        return NgramDrafter(request.prompt_token_ids, request.prediction, shared)

    def _clear_seats(self) -> list[Request]:
        cleared = super()._clear_seats()
        for request in cleared:
            if self._guessers.pop(request, None) and self._texts is not None:
                self._texts.add(request)
        return cleared

    def admit(self, pool: SchedulerPool) -> None:
        super().admit(pool)
        self._reads_first = False
        if self.config.draft_length and not self._out_of_room:
            self._deal(pool)

    def plan(self) -> StepPlan:
        """Plan nothing if tokens in flight must be read first; else as phase 9, requests without guesses first."""
        if self._reads_first:
            return StepPlan()
        plan = super().plan()
        if not any(request.drafts for request in plan.decode):
            return plan
        decode = sorted(plan.decode, key=lambda request: bool(request.drafts))  # those of one row come first
        return dataclasses.replace(plan, decode=tuple(decode))

    def _deal(self, pool: SchedulerPool) -> None:
        """Choose the guesses that this step computes, and reserve their columns."""
        plan = super().plan()
        rows = len(plan.decode) + sum(chunk.end - chunk.start for chunk in plan.prefill)
        most_rows = self.config.draft_rows or MOST_ROWS
        if not plan.decode or rows >= most_rows:
            return
        guessing = [(request, guesser) for request in plan.decode if (guesser := self._guess(request))]
        counts = worthwhile(
            self.cost,
            len(plan.decode),
            rows,
            most_rows,
            [guesser.likely for _, guesser in guessing],
            pays=self.config.draft_rows is None,
        )
        if not any(counts):
            return
        if self.in_flight:
            self._reads_first = True
            return
        for (request, guesser), count in zip(guessing, counts, strict=False):
            while count and not self._reserve(pool, request, count):
                count -= 1
            if count:
                request.guess(guesser.guesses[:count])

    def _guess(self, request: Request) -> Guesser | None:
        """Return a request's guesser with its guesses; None if there are none."""
        limit = min(self.config.draft_length, request.max_total_tokens - request.num_tokens - 1)
        if limit <= 0:
            return None
        try:
            guesser = self._guessers.get(request)
            if guesser is None:
                guesser = self._guessers[request] = Guesser(self.new_drafter(request), Rates(self._rates))
            guesser.guess(request, limit)
        except Exception as error:  # a drafter's failure must not cost a request its answer
            self.failed_drafters += 1
            logger.warning("no guesses for request %s: %r", request.request_id, error)
            return None
        return guesser if guesser.likely else None

    def _reserve(self, pool: SchedulerPool, request: Request, count: int) -> bool:
        """Reserve columns for guesses. No new block is taken if memory is so short that others may soon need it."""
        free, block_size = pool.free_token_capacity(), self.config.block_size
        spare = free is None or free > count + block_size * (len(self.active) + len(self.waiting))
        if not spare and count > -request.num_tokens % block_size:
            return False
        return pool.reserve(request, request.num_tokens + count)
