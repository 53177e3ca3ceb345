"""Phase 9's schedule, with guesses beside the tokens that are certain.

```text
step        t            t+1                 t+2         t+3
            runs ahead   runs ahead          a verify step, committed before t+3 is planned
plan              no guess pays   guesses pay:
                                  nothing is planned
                                  until t+1 is read
```

A guess needs the latest token on the host, so a step with guesses cannot run ahead. Guesses are made for
every decode step, and compared with the tokens that come. Unless `draft_rows` is set, they are computed only
if they pay. So their computation pauses while guesses fail, and starts again when guesses would come true.
"""

from __future__ import annotations

import functools
import logging

from common.engine.scheduling import Clock, RowCost, StepPlan
from common.kv import SchedulerPool
from common.request import Request
from phase9_pipelined.scheduler import PipelinedScheduler
from phase10_speculative.config import MOST_ROWS, Config
from phase10_speculative.drafters import Dictionary, Drafter, NgramDrafter
from phase10_speculative.payoff import START, Guesser, worthwhile

logger = logging.getLogger(__name__)

MOST_SALTS = 8  # cache salts with a dictionary; for one more, the least recently used dictionary is dropped


class SpeculativeScheduler(PipelinedScheduler):
    """Phase 9's scheduler. It admits requests first, so guesses take no memory that a request waits for."""

    config: Config

    def __init__(self, config: Config, clock: Clock) -> None:
        super().__init__(config, clock)
        self.row_cost = RowCost() if config.draft_length and config.draft_rows is None else None
        self._rates = [*START]  # how often guesses of all requests came true: see `START`
        self._texts = functools.lru_cache(MOST_SALTS)(lambda _: Dictionary())  # of requests that have ended
        self._guessers: dict[Request, Guesser] = {}
        self._planned = StepPlan()

    def new_drafter(self, request: Request) -> Drafter:
        shared = self._texts(request.cache_salt) if self.config.draft_from_finished else None
        return NgramDrafter(request.prompt_token_ids, request.prediction, shared)

    def retire(self) -> list[Request]:
        retired = super().retire()
        for request in retired:
            if self._guessers.pop(request, None) and self.config.draft_from_finished:
                self._texts(request.cache_salt).add(request.token_ids)
        return retired

    def admit(self, pool: SchedulerPool) -> None:
        super().admit(pool)
        self._planned = super().plan()
        if self.config.draft_length and self._planned.decode:
            self._planned = self._with_guesses(self._planned, pool)

    def plan(self) -> StepPlan:
        return self._planned

    def _with_guesses(self, plan: StepPlan, pool: SchedulerPool) -> StepPlan:
        """Choose the guesses to compute (`worthwhile`), and reserve their columns. Returns the plan, with
        requests without guesses first.

        If there are guesses to compute but a step is in flight, returns an empty plan: that step's tokens
        must be read first.
        """
        rows = len(plan.decode) + sum(chunk.end - chunk.start for chunk in plan.prefill)
        spare_rows = (self.config.draft_rows or MOST_ROWS) - rows
        counts = worthwhile([self._guess(each) for each in plan.decode], rows, spare_rows, self.row_cost)
        if not any(counts):
            return plan
        if self.in_flight:
            return StepPlan()
        others_need = self.config.block_size * (len(self.active) + len(self.waiting))
        for request, count in zip(plan.decode, counts, strict=True):
            if count:
                columns = pool.reserve_spare(request, request.num_tokens + count, others_need)
                request.drafts.guess(self._guessers[request].guesses[: columns - request.num_tokens])
        decode = sorted(plan.decode, key=lambda request: bool(request.drafts.token_ids))
        return StepPlan(tuple(decode), plan.prefill, verifies=bool(decode[-1].drafts.token_ids))

    def _guess(self, request: Request) -> list[float]:
        """Guess a request's next tokens. Returns how likely each guess is to come true (see `Guesser.guess`);
        [] if guessing failed."""
        missing = request.max_total_tokens - request.num_tokens - 1  # beside the token that is certain
        try:
            if request not in self._guessers:
                self._guessers[request] = Guesser(request, self.new_drafter(request), self._rates)
            return self._guessers[request].guess(min(self.config.draft_length, missing))
        except Exception as error:  # a drafter's failure must not cost a request its answer
            self.failed_drafters += 1
            logger.warning("no guesses for request %s: %r", request.request_id, error)
            return []
