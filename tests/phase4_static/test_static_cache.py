"""The rectangle's memory: as long as the batch needs, and freed with the batch."""

from __future__ import annotations

import pytest
import torch

from common.kv import KVShape, Span
from common.request import Request
from phase4_static import Config
from phase4_static.cache import StaticKVCache
from tests.support.engines import CPU, greedy


def make(max_seq_len: int = 64) -> StaticKVCache:
    return StaticKVCache(Config(max_seq_len=max_seq_len), KVShape(2, 1, 4, torch.float32), CPU)


def request(prompt: int, new: int) -> Request:
    return Request(f"{prompt}+{new}", [1] * prompt, greedy(new))


def reserve(cache: StaticKVCache, *sizes: tuple[int, int]) -> list[Request]:
    requests = [request(*size) for size in sizes]
    for each in requests:
        assert cache.reserve(each, each.num_prompt_tokens)
    return requests


def test_rows_are_the_longest_prompt_and_the_most_new_tokens() -> None:
    cache = make()
    requests = reserve(cache, (3, 20), (7, 4), (5, 1))
    assert cache.block_size == 7 + 20
    assert cache.reserved_tokens == 3 * 27
    assert cache.k == (), "no memory before the batch runs"
    cache.view([Span.exact(r.slot or 0, 0, 3) for r in requests])
    assert {tuple(t.shape) for t in (*cache.k, *cache.v)} == {(3, 27, 1, 4)}
    assert len(cache.k) == len(cache.v) == 2


def test_memory_returns_with_the_last_member() -> None:
    cache = make()
    first, second = reserve(cache, (3, 4), (3, 4))
    cache.view([Span.exact(0, 0, 3), Span.exact(1, 0, 3)]).advance()
    assert cache.used_tokens == 6
    cache.release(first)
    assert (cache.used_tokens, len(cache.k)) == (3, 2)
    cache.release(second)
    assert (cache.k, cache.v, cache.used_tokens, cache.reserved_tokens) == ((), (), 0, 0)
    assert (first.slot, second.slot) == (None, None)
    cache.release(second)
    (third,) = reserve(cache, (2, 2))
    assert (third.slot, cache.block_size) == (0, 4), "a new batch owes the one before nothing"


def test_a_batch_that_has_run_cannot_grow() -> None:
    cache = make()
    (first,) = reserve(cache, (3, 4))
    cache.view([Span.exact(0, 0, 3)])
    with pytest.raises(RuntimeError, match="cannot grow"):
        cache.reserve(request(2, 2), 2)
    cache.release(first)
    assert cache.reserve(request(2, 2), 2)
