"""Exercise: bound the stall that newcomers cause."""

from __future__ import annotations

from common.kv import KVPool
from common.request import Request
from phase5_continuous import Scheduler


class PromptBudget(Scheduler):
    """Phase 5, but one step admits at most `budget` prompt tokens; a longer prompt is admitted alone.

    Everyone who decodes waits while prompts are computed, so this bounds the wait (a single long prompt still
    stalls them: cutting it in pieces is phase 7). Still first come, first served: who does not fit any more waits
    for the next step, and so do all behind.

    `admit` seats the front of the queue with `_seat` until one call says False, so that is the place to say no.
    """

    budget = 64

    def admit(self, pool: KVPool) -> None:
        super().admit(pool)  # a step begins: nothing of its budget is spent

    def _seat(self, request: Request, pool: KVPool) -> bool:
        return super()._seat(request, pool)  # say no to a request that goes over what is left
