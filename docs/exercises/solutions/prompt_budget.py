"""Solution: count what a step has admitted, and say no when the next would go over."""

from __future__ import annotations

from common.kv import KVPool
from common.request import Request
from phase5_continuous import Scheduler


class PromptBudget(Scheduler):
    budget = 64
    spent = 0

    def admit(self, pool: KVPool) -> None:
        self.spent = 0
        super().admit(pool)

    def _seat(self, request: Request, pool: KVPool) -> bool:
        tokens = len(request.token_ids)
        if self.spent and self.spent + tokens > self.budget:
            return False
        if not super()._seat(request, pool):
            return False
        self.spent += tokens
        return True
