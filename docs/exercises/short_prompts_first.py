"""Exercise: let short prompts overtake long ones.

Write `ShortPromptsFirst`, then run `.venv/bin/pytest docs/exercises/short_prompts_first.py`.
The check runs the scheduler without a model, and looks at the chunks of each step.
"""

from __future__ import annotations

import pytest
import torch

import phase7_chunked
from common.kv import KVShape
from common.request import Request, SamplingParams
from phase6_paged.cache import PagedKVCachePool
from phase7_chunked import Scheduler


class ShortPromptsFirst(Scheduler):
    """Phase 7's scheduler, but the prompt with the fewest tokens left to compute advances first. Among prompts with
    equally many, the oldest does.

    `request.token_ids` has the tokens to compute. `request.prefill_progress` is the number of computed tokens.
    """

    def prefill_priority(self, request: Request) -> tuple[int, int]:
        return super().prefill_priority(request)  # the request with the smallest tuple advances first


# ---------------------------------------------------------------------- the check

LENGTHS = {"long": 300, "middle": 150, "short": 60, "late": 60}


# The request of each chunk and the chunk's number of tokens, in the order of computation.
SHARED = [
    *(("short", 60), ("late", 40)),
    *(("late", 20), ("middle", 80)),
    *(("middle", 70), ("long", 30)),
    *(("long", 100), ("long", 100), ("long", 70)),
]
ONE_A_STEP = [
    *(("short", 60), ("late", 60)),
    *(("middle", 100), ("middle", 50)),
    *(("long", 100), ("long", 100), ("long", 100)),
]


@pytest.mark.parametrize(("max_chunks", "expected"), [(None, SHARED), (1, ONE_A_STEP)])
def test_the_fewest_tokens_left_go_first(max_chunks: int | None, expected: list[tuple[str, int]]) -> None:
    config = phase7_chunked.Config(
        max_seq_len=512, prefill_chunk_size=100, max_prefill_chunks_per_step=max_chunks
    )
    pool = PagedKVCachePool(config.model_copy(), KVShape(1, 1, 1, torch.float32), torch.device("cpu"))
    scheduler = ShortPromptsFirst(config, lambda: 0.0)
    for arrival, (name, length) in enumerate(LENGTHS.items()):
        request = Request(name, [0] * length, SamplingParams(max_new_tokens=9))
        request.arrival = arrival
        assert scheduler.add_request(request)
    order = []
    while True:
        scheduler.admit(pool)
        plan = scheduler.plan()
        if not plan.prefill:
            break
        for chunk in plan.prefill:
            order.append((chunk.request.request_id, chunk.end - chunk.start))
            chunk.request.prefill_progress = chunk.end
            if chunk.is_last:
                chunk.request.start_decode()
    assert order == expected


# ---------------------------------------------------------------------- one way to solve it


class Solution(Scheduler):
    """Sort by the tokens left. While short prompts keep arriving, a long prompt waits."""

    def prefill_priority(self, request: Request) -> tuple[int, int]:
        return len(request.token_ids) - request.prefill_progress, request.arrival
