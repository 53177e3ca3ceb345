"""Block tables: as long as their tokens need, with blocks in any order. Rules for every pool are tested in
`tests/test_pool_conformance.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.kv import Span
from common.request import Request
from phase6_paged.allocator import OutOfBlocksError
from phase6_paged.cache import PagedKVCachePool
from tests.support.engines import Variant, greedy
from tests.support.pools import assert_consistent, shuffle_free_blocks


def pool_of(num_blocks: int, block_size: int = 4, **options: Any) -> PagedKVCachePool:
    pool: PagedKVCachePool = Variant("phase6_paged").pool(
        num_blocks=num_blocks, block_size=block_size, **options
    )
    return pool


def request(prompt: int) -> Request:
    return Request(f"{prompt} tokens", [1] * prompt, greedy(4))


def seat(pool: PagedKVCachePool, tokens: int) -> Request:
    """Return a request that holds memory for `tokens` tokens."""
    owner = request(tokens)
    assert pool.reserve(owner, tokens)
    return owner


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_blocks_at_a_boundary(block_size: int, n: int, offset: int) -> None:
    tokens = n * block_size + offset
    if tokens == 0:
        pytest.skip("no tokens at all")
    pool = pool_of(8, block_size, max_seq_len=8 * block_size)
    owner = seat(pool, tokens)
    blocks = n + 1 if offset == 1 else n if block_size > 1 or offset == 0 else n - 1
    assert owner.slot is not None
    assert len(pool.block_table(owner.slot)) == blocks
    assert pool.capacity(owner.slot) == pool.reserved_tokens == blocks * block_size
    assert pool.free_token_capacity() == (8 - blocks) * block_size
    # One more token takes a new block only if the last one is full.
    assert pool.reserve(owner, tokens + 1)
    assert len(pool.block_table(owner.slot)) == blocks + (tokens % block_size == 0)
    assert_consistent(pool)


@pytest.mark.parametrize("tokens", [8, 5, 0])
def test_reserving_less_or_the_same_again_changes_nothing(tokens: int) -> None:
    pool = pool_of(4)
    owner = seat(pool, 8)
    assert pool.reserve(owner, tokens)
    assert pool.reserved_tokens == 8


def test_growing_past_the_pool_leaves_the_table_alone() -> None:
    pool = pool_of(3)
    slot = pool.allocate_slot()
    pool.grow(slot, 8)
    table = list(pool.block_table(slot))
    with pytest.raises(OutOfBlocksError):
        pool.grow(slot, 13)
    assert pool.block_table(slot) == table
    assert_consistent(pool)


def test_a_slots_name_is_never_used_again() -> None:
    """A stale slot raises KeyError, instead of giving another sequence's columns."""
    pool = pool_of(4)
    names = []
    for _ in range(3):
        owner = seat(pool, 3)
        names.append(owner.slot)
        pool.release(owner)
    assert len(set(names)) == 3
    for ask in (pool.free_slot, lambda slot: pool.grow(slot, 4)):
        with pytest.raises(KeyError):
            ask(names[0])


def test_a_block_in_no_table_is_found_and_reclaimed() -> None:
    pool = pool_of(8)
    owner = seat(pool, 6)
    assert pool.audit_blocks() == set()
    lost = set(pool.allocator.allocate(3, owner=owner.slot or 0))
    assert pool.audit_blocks() == lost
    assert pool.audit_blocks() == lost, "looking changes nothing"
    assert pool.reclaim_leaked_blocks() == 3
    assert pool.reclaim_leaked_blocks() == 0
    assert_consistent(pool)


# ---------------------------------------------------------------------- any history


class PoolMachine(RuleBasedStateMachine):
    """Sequences reserve, grow, write, leave and are forgotten. A dictionary has the tokens that each one holds."""

    operations: ClassVar[int] = 0

    @initialize(blocks=st.integers(1, 24), block_size=st.integers(1, 8), seed=st.integers(0, 99))
    def start(self, blocks: int, block_size: int, seed: int) -> None:
        self.held: dict[Request, int] = {}  # request -> the most tokens that it has reserved
        self.written: dict[Request, int] = {}
        self.free = blocks
        self.pool = pool_of(blocks, block_size, max_seq_len=max(2, blocks * block_size))
        shuffle_free_blocks(self.pool, seed)

    def pick(self, choice: int) -> Request:
        type(self).operations += 1
        return list(self.held)[choice % len(self.held)]

    def reserve(self, owner: Request, tokens: int) -> None:
        type(self).operations += 1
        now = self.held.get(owner, 0)
        more = max(0, self.pool.blocks_for(tokens) - self.pool.blocks_for(now))
        has_seat = owner in self.held or len(self.held) < len(self.pool.block_tables)
        fits = more <= self.free and has_seat
        assert self.pool.reserve(owner, tokens) == fits
        if fits:
            self.held[owner] = max(now, tokens)
            self.written.setdefault(owner, 0)
            self.free -= more
        assert (owner.slot is not None) == (owner in self.held)

    def forget(self, owner: Request) -> None:
        self.free += self.pool.blocks_for(self.held.pop(owner))
        del self.written[owner]

    @rule(tokens=st.integers(1, 40))
    def arrive(self, tokens: int) -> None:
        self.reserve(request(tokens), tokens)

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 99), tokens=st.integers(1, 20))
    def grow(self, choice: int, tokens: int) -> None:
        owner = self.pick(choice)
        self.reserve(owner, self.held[owner] + tokens)

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 99), tokens=st.integers(1, 20))
    def write(self, choice: int, tokens: int) -> None:
        owner = self.pick(choice)
        start = self.written[owner]
        end = min(start + tokens, self.held[owner])
        assert owner.slot is not None
        if start < end:
            self.pool.view([Span.exact(owner.slot, start, end)]).advance()
            self.written[owner] = end

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 99))
    def leave(self, choice: int) -> None:
        owner = self.pick(choice)
        self.pool.release(owner)
        self.forget(owner)

    @precondition(lambda self: self.held)
    @rule(choices=st.sets(st.integers(0, 99), max_size=3))
    def forget_some(self, choices: set[int]) -> None:
        """An audit after a failure reclaims the memory of requests that are not among the holders."""
        gone = {self.pick(choice) for choice in choices}
        for owner in gone:
            self.forget(owner)
        assert self.pool.audit(self.held) == len(gone)

    @precondition(lambda self: self.free > 0)
    @rule(count=st.integers(1, 3))
    def lose_blocks(self, count: int) -> None:
        type(self).operations += 1
        lost = self.pool.allocator.allocate(min(count, self.free), owner=-1)
        assert self.pool.audit_blocks() == set(lost)
        assert self.pool.allocator.find_leaked_blocks(self.pool._tables) == {-1: set(lost)}
        assert self.pool.reclaim_leaked_blocks() == len(lost)

    @rule()
    def free_wrongly(self) -> None:
        type(self).operations += 1
        allocator = self.pool.allocator
        with pytest.raises(ValueError):  # noqa: PT011 - the message is free, for learners
            allocator.free([*allocator.allocated_block_ids(), allocator.num_blocks])

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        assert_consistent(self.pool)
        assert self.pool.allocator.num_free == self.free
        assert self.pool.used_tokens == sum(self.written.values())
        for owner, tokens in self.held.items():
            assert owner.slot is not None
            assert len(self.pool.block_table(owner.slot)) == self.pool.blocks_for(tokens)

    def teardown(self) -> None:
        if not self.operations:  # `start` failed, and its error is the one to report
            return
        for owner in self.held:
            self.pool.release(owner)
        assert_consistent(self.pool)
        assert self.pool.allocator.num_free == self.pool.allocator.num_blocks


@pytest.mark.parametrize("operations", [3000, pytest.param(40_000, marks=pytest.mark.slow)])
def test_the_pool_under_any_history(operations: int) -> None:
    PoolMachine.operations = 0
    chosen = settings(
        max_examples=operations // 60,  # examples may be short, and some steps find nothing to do
        stateful_step_count=100,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(PoolMachine, settings=chosen)
    assert PoolMachine.operations >= operations
