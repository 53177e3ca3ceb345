"""Runs `SimilarLengths` on integers alone: a scheduler needs no model."""

from __future__ import annotations

import torch
from similar_lengths import SimilarLengths

import phase4_static
from common.kv import KVShape
from common.request import Request, SamplingParams
from phase4_static.cache import StaticKVCache

LENGTHS = [10, 500, 12, 480, 11, 510, 9, 490]


def batches(scheduler_class: type[phase4_static.Scheduler]) -> list[list[int]]:
    """Prompt lengths of each batch that the scheduler forms of `LENGTHS`, four seats."""
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
