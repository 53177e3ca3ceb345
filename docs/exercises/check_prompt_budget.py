"""Runs `PromptBudget` on integers alone and looks at what each step would prefill."""

from __future__ import annotations

import torch
from prompt_budget import PromptBudget

import phase5_continuous
from common.kv import KVShape
from common.request import Request, SamplingParams
from phase5_continuous.cache import SlottedKVCache

LENGTHS = [30, 30, 30, 200, 10, 50, 5, 64, 1, 3]


def prefills() -> list[list[int]]:
    """Prompt lengths that each step prefills, one seat for every request."""
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
