"""One pool for the engine's life: slots are taken, given back and reused, and each sees its own columns."""

from __future__ import annotations

import pytest
import torch

from common.kv import KVShape, Span
from phase5_continuous.cache import SlottedKVCache
from tests.engine_helpers import Variant

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


def test_a_slot_that_is_not_in_use_is_a_key_error(cache: SlottedKVCache) -> None:
    slot = cache.allocate_slot()
    cache.free_slot(slot)
    with pytest.raises(KeyError):
        cache.free_slot(slot)
    assert cache.free_slot_count() == 3


def test_memory_is_there_for_good(cache: SlottedKVCache) -> None:
    assert {tuple(layer.shape) for layer in (*cache.k, *cache.v)} == {(3, 256, 1, 4)}
    assert (cache.block_size, cache.max_request_tokens(), cache.reserved_tokens) == (256, 256, 0)
    cache.allocate_slot()
    assert cache.reserved_tokens == 256


def write(cache: SlottedKVCache, slots: list[int], counts: list[int], value: float) -> None:
    """Write `counts` more columns for each slot. Elements are the slot's `value` and the column's number."""
    spans = []
    for slot, count in zip(slots, counts, strict=True):
        start = cache.get_seq_len(slot)
        spans.append(Span.exact(slot, start, start + count))
    view = cache.view(spans)
    for layer in range(2):
        numbers = [value * (span.slot + 1) + c for span in spans for c in range(span.start, span.end)]
        k = torch.tensor(numbers).view(-1, 1, 1).expand(-1, 1, 4) + 0.5 * layer
        view.attend(layer, torch.zeros_like(k), k, -k, scale=1.0, window=None)
    view.advance()


def test_interleaved_sequences_write_and_read_their_own_columns(cache: SlottedKVCache) -> None:
    """Lengths 100, 50 and 200, written a few columns at a time and side by side."""
    slots = [cache.allocate_slot() for _ in range(3)]
    write(cache, slots, [40, 10, 120], 1000.0)
    write(cache, [slots[2], slots[0]], [30, 1], 1000.0)
    write(cache, slots, [59, 40, 50], 1000.0)
    assert [cache.get_seq_len(slot) for slot in slots] == [100, 50, 200]
    assert cache.used_tokens == 350
    for slot, length in zip(slots, (100, 50, 200), strict=True):
        columns = torch.arange(length, dtype=torch.float32)
        for layer in range(2):
            expected = (1000.0 * (slot + 1) + columns + 0.5 * layer).view(-1, 1, 1).expand(-1, 1, 4)
            assert torch.equal(cache.k[layer][slot, :length], expected)
            assert torch.equal(cache.v[layer][slot, :length], -expected)
            assert not cache.k[layer][slot, length:].any(), "columns past the length belong to no sequence"


def test_a_reused_slot_starts_at_0_and_never_sees_its_last_occupant(cache: SlottedKVCache) -> None:
    """Equal scores average the visible values: stale columns would show in the mean."""
    first, second = cache.allocate_slot(), cache.allocate_slot()
    write(cache, [first, second], [60, 40], 1000.0)
    cache.free_slot(first)
    assert cache.allocate_slot() == first
    assert cache.get_seq_len(first) == 0
    write(cache, [first], [3], -1.0)
    view = cache.view([Span.exact(first, 3, 4), Span.exact(second, 40, 41)])
    k = torch.tensor([5.0, 7.0]).view(2, 1, 1).expand(2, 1, 4)
    mean = view.attend(0, torch.zeros(2, 1, 4), k, k, scale=1.0, window=None)
    own = (torch.arange(3.0) - (first + 1)).neg()
    other = (torch.arange(40.0) + 1000.0 * (second + 1)).neg()
    torch.testing.assert_close(mean[0, 0, 0], torch.cat([own, torch.tensor([5.0])]).mean())
    torch.testing.assert_close(mean[1, 0, 0], torch.cat([other, torch.tensor([7.0])]).mean())
