"""A pool lasts as long as its engine: slots are reserved, released and reused, and each has its own columns."""

from __future__ import annotations

import pytest
import torch

from common.kv import KVShape
from phase5_continuous.cache import SlottedKVCache
from tests.support.engines import Variant

SHAPE = KVShape(2, 1, 4, torch.float32)


@pytest.fixture
def cache(variant: Variant) -> SlottedKVCache:
    """Three slots of 256 columns."""
    pool = variant.pool(SHAPE, max_batch_size=3, max_seq_len=256)
    assert isinstance(pool, SlottedKVCache)
    return pool


def test_all_slots_and_one_more(cache: SlottedKVCache) -> None:
    slots = [cache.allocate_slot() for _ in range(3)]
    assert sorted(slots) == [0, 1, 2]
    assert cache.free_slot_count() == 0
    with pytest.raises(RuntimeError):
        cache.allocate_slot()
    cache.free_slot(slots[1])
    assert cache.free_slot_count() == 1
    assert cache.allocate_slot() == slots[1]
