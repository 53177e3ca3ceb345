"""Exercise: batches of similar lengths.

Write `SimilarLengths`, then run `.venv/bin/pytest docs/exercises/similar_lengths.py`.
The check runs the scheduler without a model, and looks at the prompt lengths in each batch.
"""

from __future__ import annotations

from collections import deque

import torch

import phase4_static
from common.kv import KVPool, KVShape
from common.request import Request, SamplingParams
from phase4_static import Scheduler
from phase4_static.cache import StaticKVCache


class SimilarLengths(Scheduler):
    """Phase 4's scheduler, but the oldest request is batched with the requests whose prompts are nearest to its own
    prompt in length.

    `admit` of phase 4 takes requests from the front of `self.waiting` when a batch is due, so it is enough to bring
    the right requests to the front first. The oldest request must stay first: no request may starve.
    """

    def admit(self, pool: KVPool) -> None:
        super().admit(pool)  # bring the right requests to the front before this


# ---------------------------------------------------------------------- the check

LENGTHS = [10, 500, 12, 480, 11, 510, 9, 490]


def batches(scheduler_class: type[phase4_static.Scheduler]) -> list[list[int]]:
    """Return the prompt lengths of each batch that the scheduler forms from `LENGTHS`, with at most four requests a
    batch."""
    config = phase4_static.Config(max_batch_size=4, max_seq_len=1024, batch_wait_timeout_s=0.0)
    pool = StaticKVCache(config, KVShape(1, 1, 1, torch.float32), torch.device("cpu"))
    scheduler = scheduler_class(config, lambda: 0.0)
    for index, length in enumerate(LENGTHS):
        request = Request(f"r{index}", [0] * length, SamplingParams(max_new_tokens=1))
        assert scheduler.add_request(request)
    formed = []
    while scheduler.has_work:
        for request in scheduler.retire():
            pool.release(request)
        if not scheduler.has_work:
            break
        scheduler.admit(pool)
        formed.append([request.num_prompt_tokens for request in scheduler.active])
        for request in scheduler.active:
            request.start_decode()
            request.finish("length")
    return formed


def padding(formed: list[list[int]]) -> int:
    return sum(max(batch) - length for batch in formed for length in batch)


def test_everyone_is_served_once_and_no_batch_is_too_large() -> None:
    formed = batches(SimilarLengths)
    assert sorted(length for batch in formed for length in batch) == sorted(LENGTHS)
    assert all(len(batch) <= 4 for batch in formed)
    assert padding(formed) < padding(batches(phase4_static.Scheduler)) / 10


def test_who_waited_longest_goes_first() -> None:
    formed = batches(SimilarLengths)
    assert LENGTHS[0] in formed[0]
    left = [length for length in LENGTHS if length not in formed[0]]
    assert left[0] in formed[1]
    assert padding(formed) < 100  # and the batches really are of similar lengths


# ---------------------------------------------------------------------- one way to solve it


class Solution(Scheduler):
    """A stable sort of all waiting requests, by the difference in prompt length from the first request."""

    def admit(self, pool: KVPool) -> None:
        if self.waiting and not self.active:
            first = self.waiting[0].num_prompt_tokens
            # The first request's difference is 0. Python's sort keeps the order of equals, so it stays first.
            self.waiting = deque(sorted(self.waiting, key=lambda r: abs(r.num_prompt_tokens - first)))
        super().admit(pool)
