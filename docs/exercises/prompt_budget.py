"""Exercise: bound the stall that new prompts cause.

Write `PromptBudget`, then run `.venv/bin/pytest docs/exercises/prompt_budget.py`.
The check runs the scheduler without a model, and looks at the prompts that each step would prefill.
"""

from __future__ import annotations

import torch

import phase5_continuous
from common.kv import KVPool, KVShape
from common.request import Request, SamplingParams
from phase5_continuous import Scheduler
from phase5_continuous.cache import SlottedKVCache


class PromptBudget(Scheduler):
    """Phase 5's scheduler, but one step admits at most `budget` prompt tokens. A longer prompt is admitted alone.

    Requests that decode wait while prompts are computed, so the budget bounds their wait. (A single long prompt
    still stalls them. Phase 7 cuts it into chunks.) Admission stays first come, first served: a request that does
    not fit waits for the next step, and so do all requests behind it.

    `admit` calls `_seat` for the request at the front of the queue, until a call returns False. To refuse a
    request, return False from `_seat`.
    """

    budget = 64

    def admit(self, pool: KVPool) -> None:
        super().admit(pool)  # called once a step: nothing of the budget is spent yet

    def _seat(self, request: Request, pool: KVPool) -> bool:
        return super()._seat(request, pool)  # refuse a request that is longer than the budget left


# ---------------------------------------------------------------------- the check

LENGTHS = [30, 30, 30, 200, 10, 50, 5, 64, 1, 3]


def prefills() -> list[list[int]]:
    """Return the prompt lengths that each step prefills, if there is a seat for every request."""
    config = phase5_continuous.Config(max_batch_size=len(LENGTHS), max_seq_len=256)
    pool = SlottedKVCache(config, KVShape(1, 1, 1, torch.float32), torch.device("cpu"))
    scheduler = PromptBudget(config, lambda: 0.0)
    for index, length in enumerate(LENGTHS):
        assert scheduler.add_request(Request(f"r{index}", [0] * length, SamplingParams(max_new_tokens=9)))
    steps = []
    for _ in range(50):
        scheduler.admit(pool)
        plan = scheduler.plan()
        if not plan.prefill:
            return steps
        steps.append([chunk.end - chunk.start for chunk in plan.prefill])
        for chunk in plan.prefill:
            chunk.request.start_decode()
    raise AssertionError("requests are left waiting")


def test_no_step_goes_over_its_budget() -> None:
    steps = prefills()
    assert all(sum(step) <= PromptBudget.budget or len(step) == 1 for step in steps)
    assert len(steps) > 1


def test_order_is_kept_and_steps_are_full() -> None:
    assert prefills() == [[30, 30], [30], [200], [10, 50], [5], [64], [1, 3]]


# ---------------------------------------------------------------------- one way to solve it


class Solution(Scheduler):
    """Count the tokens that a step has admitted, and refuse the request that would go over the budget."""

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
