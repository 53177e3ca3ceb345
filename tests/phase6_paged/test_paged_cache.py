"""Block tables: as long as what they hold, in any order, and nobody's twice."""

from __future__ import annotations

import pytest
import torch

from common.kv import KVCapacityError, Span
from common.request import Request
from phase6_paged.allocator import OutOfBlocksError
from tests.phase6_paged.support import assert_consistent, make_pool, request, shuffle_free_blocks


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_blocks_at_a_boundary(block_size: int, n: int, offset: int) -> None:
    tokens = n * block_size + offset
    if tokens == 0:
        pytest.skip("no tokens at all")
    pool = make_pool(8, block_size, max_seq_len=8 * block_size)
    owner = request(tokens)
    assert pool.reserve(owner, tokens)
    blocks = n + 1 if offset == 1 else n if block_size > 1 or offset == 0 else n - 1
    assert owner.slot is not None
    assert len(pool.block_table(owner.slot)) == blocks
    assert pool.capacity(owner.slot) == blocks * block_size
    assert pool.free_token_capacity() == (8 - blocks) * block_size
    assert pool.reserved_tokens == blocks * block_size
    pool.view([Span.exact(owner.slot, 0, tokens)]).advance()
    assert pool.get_seq_len(owner.slot) == tokens
    assert_consistent(pool)
    # One more token takes a block exactly where the last one is full.
    assert pool.reserve(owner, tokens + 1)
    assert len(pool.block_table(owner.slot)) == blocks + (tokens % block_size == 0)
    assert_consistent(pool)


def test_a_table_grows_at_its_end() -> None:
    pool = make_pool(6)
    shuffle_free_blocks(pool, seed=1)
    owner = request(3)
    seen: list[int] = []
    for tokens in range(1, 25):
        assert pool.reserve(owner, tokens)
        assert owner.slot is not None
        table = list(pool.block_table(owner.slot))
        assert table[: len(seen)] == seen, "columns that were written keep their place"
        assert len(table) == -(-tokens // 4)
        seen = table
    assert not pool.reserve(owner, 25)
    assert list(pool.block_table(owner.slot)) == seen


def test_reserving_less_or_the_same_again_changes_nothing() -> None:
    pool = make_pool(4)
    owner = request(8)
    assert pool.reserve(owner, 8)
    assert owner.slot is not None
    table = list(pool.block_table(owner.slot))
    for tokens in (8, 5, 0):
        assert pool.reserve(owner, tokens)
        assert list(pool.block_table(owner.slot)) == table


@pytest.mark.parametrize("has_slot", [False, True])
def test_a_reservation_is_all_or_nothing(has_slot: bool) -> None:
    pool = make_pool(4)
    other, owner = request(4), request(13)
    assert pool.reserve(other, 4)
    if has_slot:
        assert pool.reserve(owner, 4)
    before = owner.slot, list(pool.allocator._free), {s: list(t) for s, t in pool._tables.items()}
    assert not pool.reserve(owner, 17 - 4 + 4)
    assert (owner.slot, list(pool.allocator._free), pool._tables) == before
    assert_consistent(pool)
    assert pool.reserve(owner, 12)
    assert pool.free_token_capacity() == 0


def test_growing_past_the_pool_leaves_the_table_alone() -> None:
    pool = make_pool(3)
    slot = pool.allocate_slot()
    pool.grow(slot, 8)
    table = list(pool.block_table(slot))
    with pytest.raises(OutOfBlocksError):
        pool.grow(slot, 13)
    assert list(pool.block_table(slot)) == table
    assert_consistent(pool)


def test_an_unknown_slot_is_a_key_error() -> None:
    pool = make_pool(4)
    owner = request(3)
    assert pool.reserve(owner, 3)
    assert owner.slot is not None
    gone = owner.slot
    pool.release(owner)
    for slot in (gone, 99):
        for ask in (pool.capacity, pool.get_seq_len, pool.block_table, pool.free_slot):
            with pytest.raises(KeyError):
                ask(slot)
        with pytest.raises(KeyError):
            pool.grow(slot, 4)
        with pytest.raises(KeyError):
            pool.view([Span.exact(slot, 0, 1)])
    assert_consistent(pool)
    assert pool.allocator.num_free == 4


def test_a_slots_name_is_never_used_again() -> None:
    """Who kept an old handle gets a KeyError, not a neighbour's columns."""
    pool = make_pool(4)
    names = []
    for _ in range(3):
        owner = request(3)
        assert pool.reserve(owner, 3)
        names.append(owner.slot)
        pool.release(owner)
    assert len(set(names)) == 3


def test_releasing_twice_is_harmless() -> None:
    pool = make_pool(4)
    owner, other = request(8), request(4)
    assert pool.reserve(owner, 8)
    pool.release(owner)
    assert pool.reserve(other, 4)
    pool.release(owner)
    assert owner.slot is None
    assert pool.allocator.num_allocated == 1
    assert_consistent(pool)


def test_a_view_follows_the_table() -> None:
    """Rows and gather indices, in a table whose blocks lie backwards."""
    pool = make_pool(8, 4)
    pool.allocator._free.reverse()  # blocks are given out from 7 down
    a, b = request(6), request(5)
    assert pool.reserve(a, 6)
    assert pool.reserve(b, 5)
    assert a.slot is not None
    assert b.slot is not None
    assert [list(pool.block_table(s)) for s in (a.slot, b.slot)] == [[7, 6], [5, 4]]
    view = pool.view([Span.exact(b.slot, 0, 5), Span.exact(a.slot, 0, 6)])
    assert view.layout.write_addresses.tolist() == [20, 21, 22, 23, 16, 28, 29, 30, 31, 24, 25]
    assert view.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert view.layout.block_table.tolist() == [[5, 4], [7, 6]]
    assert view.layout.block_size == 4


def test_a_pass_past_its_own_blocks_is_refused_and_writes_nothing() -> None:
    pool = make_pool(8, 4)
    a, b = request(4), request(4)
    for owner in (a, b):
        assert pool.reserve(owner, 4)
    assert a.slot is not None
    for spans in ([Span.exact(a.slot, 0, 5)], [Span.exact(a.slot, 4, 5)], [Span.exact(a.slot, 1, 2)]):
        with pytest.raises(KVCapacityError):
            pool.view(spans)
    assert pool.used_tokens == 0
    assert all(not layer.any() for layer in (*pool.k, *pool.v))


def test_a_write_changes_its_owners_rows_and_no_other() -> None:
    pool = make_pool(6, 4)
    shuffle_free_blocks(pool, seed=3)
    owners = [request(n) for n in (7, 5, 4)]
    for owner in owners:
        assert pool.reserve(owner, owner.num_prompt_tokens)
    for layer in (*pool.k, *pool.v):
        layer.fill_(-1.0)
    assert owners[1].slot is not None
    view = pool.view([Span.exact(owners[1].slot, 0, 5)])
    new = torch.ones(5, 1, 1)
    view.attend(0, new, new, new, scale=1.0, window=None)
    table = pool.block_table(owners[1].slot)
    rows = {table[c // 4] * 4 + c % 4 for c in range(5)}
    for layer in (*pool.k, *pool.v):
        assert set(layer.flatten().ne(-1.0).nonzero().flatten().tolist()) == rows
    assert pool.get_seq_len(owners[1].slot) == 0, "lengths move when the whole pass has succeeded"


# ---------------------------------------------------------------------- audits


def test_a_block_in_no_table_is_found_and_reclaimed() -> None:
    pool = make_pool(8)
    owner = request(6)
    assert pool.reserve(owner, 6)
    assert pool.audit_blocks() == set()
    lost = set(pool.allocator.allocate(3, owner=owner.slot or 0))
    assert pool.audit_blocks() == lost
    assert pool.audit_blocks() == lost, "looking changes nothing"
    assert pool.reclaim_leaked_blocks() == 3
    assert pool.reclaim_leaked_blocks() == 0
    assert_consistent(pool)
    assert pool.allocator.num_allocated == 2


def test_an_audit_reclaims_slots_without_a_holder_and_lost_blocks() -> None:
    pool = make_pool(8)
    holder, forgotten, waiting = request(6), request(9), request(3)
    assert pool.reserve(holder, 6)
    assert pool.reserve(forgotten, 9)
    pool.allocator.allocate(1, owner=77)
    assert pool.audit([holder, forgotten, waiting]) == 1
    assert pool.audit([holder, waiting]) == 1, "one slot, with its three blocks"
    assert pool.audit([holder]) == 0
    assert_consistent(pool)
    assert pool.allocator.num_allocated == 2


def test_after_everything_is_released_every_block_is_free() -> None:
    pool = make_pool(8)
    owners: list[Request] = [request(n) for n in (1, 4, 5, 8)]
    for owner in owners:
        assert pool.reserve(owner, owner.num_prompt_tokens)
    for owner in owners[::-2] + owners[::2]:
        pool.release(owner)
    for owner in owners:
        pool.release(owner)
    assert (pool.allocator.num_free, pool.reserved_tokens, pool.used_tokens) == (8, 0, 0)
    assert pool.audit([]) == 0
    assert_consistent(pool)
