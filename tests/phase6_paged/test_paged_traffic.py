"""Random histories: of one pool, and of a whole engine. Nothing is lost, shared or told twice."""

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
from tests.phase6_paged.support import (
    PagedTraffic,
    assert_consistent,
    make_pool,
    request,
    shuffle_free_blocks,
)
from tests.traffic import assert_everything_happened, random_traffic, state_machine


class PoolMachine(RuleBasedStateMachine):
    """Sequences reserve, grow, write, leave and are forgotten; a plain dictionary knows what each must hold."""

    operations: ClassVar[int] = 0

    @initialize(blocks=st.integers(0, 24), block_size=st.integers(1, 8), seed=st.integers(0, 99))
    def start(self, blocks: int, block_size: int, seed: int) -> None:
        self.pool = make_pool(max(blocks, 1), block_size)
        if blocks == 0:  # legal for the pool's bookkeeping, though no option asks for it
            self.pool.allocator._free.clear()
            self.pool.allocator.num_blocks = 0
        shuffle_free_blocks(self.pool, seed)
        self.held: dict[Request, int] = {}  # request -> tokens reserved at the most
        self.written: dict[Request, int] = {}
        self.free = blocks

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def pick(self, choice: int) -> Request:
        return list(self.held)[choice % len(self.held)]

    def reserve(self, owner: Request, tokens: int) -> bool:
        type(self).operations += 1
        now = self.held.get(owner, 0)
        more = max(0, self.blocks_of(tokens) - self.blocks_of(now))
        has_seat = owner in self.held or len(self.held) < len(self.pool.block_tables)
        fits = more <= self.free and has_seat
        assert self.pool.reserve(owner, tokens) == fits
        if fits:
            self.held[owner] = max(now, tokens)
            self.written.setdefault(owner, 0)
            self.free -= more
        return fits

    @rule(tokens=st.integers(1, 40))
    def arrive(self, tokens: int) -> None:
        owner = request(tokens)
        if not self.reserve(owner, tokens):
            assert owner.slot is None

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 99), tokens=st.integers(1, 20))
    def grow(self, choice: int, tokens: int) -> None:
        owner = self.pick(choice)
        self.reserve(owner, self.held[owner] + tokens)

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 99), tokens=st.integers(1, 20))
    def write(self, choice: int, tokens: int) -> None:
        type(self).operations += 1
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
        type(self).operations += 1
        owner = self.pick(choice)
        self.pool.release(owner)
        assert owner.slot is None
        self.free += self.blocks_of(self.held.pop(owner))
        del self.written[owner]

    @precondition(lambda self: self.held)
    @rule(choices=st.sets(st.integers(0, 99), max_size=3))
    def forget_some(self, choices: set[int]) -> None:
        """An audit after a failure takes back what nobody answers for."""
        type(self).operations += 1
        gone = {self.pick(choice) for choice in choices}
        self.free += sum(self.blocks_of(self.held.pop(owner)) for owner in gone)
        for owner in gone:
            del self.written[owner]
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
        wrong = [*allocator.allocated_block_ids(), allocator.num_blocks]
        with pytest.raises(ValueError, match="not allocated"):
            allocator.free(wrong)

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        assert_consistent(self.pool)
        assert self.pool.allocator.num_free == self.free
        assert self.pool.used_tokens == sum(self.written.values())
        for owner, tokens in self.held.items():
            assert owner.slot is not None
            assert len(self.pool.block_table(owner.slot)) == self.blocks_of(tokens)

    def teardown(self) -> None:
        for owner in self.held:
            self.pool.release(owner)
        assert_consistent(self.pool)
        assert self.pool.allocator.num_free == self.pool.allocator.num_blocks


def run_pool_machine(operations: int) -> None:
    PoolMachine.operations = 0
    chosen = settings(
        max_examples=operations // 60,  # examples may be short, and some steps find nothing to do
        stateful_step_count=100,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(PoolMachine, settings=chosen)
    assert PoolMachine.operations >= operations


def test_the_pool_under_10000_operations() -> None:
    run_pool_machine(10_000)


@pytest.mark.slow
def test_the_pool_under_100000_operations() -> None:
    run_pool_machine(100_000)


# ---------------------------------------------------------------------- the engine

TIGHT: dict[str, Any] = {"block_size": 4, "num_blocks": 10}  # one sequence of 40 tokens, three seats

TestPagedTraffic = state_machine("phase6_paged", examples=40, steps=50, kind=PagedTraffic, **TIGHT)


def test_10000_random_operations_in_a_tight_pool() -> None:
    traffic = random_traffic("phase6_paged", 10_000, seed=1, kind=PagedTraffic, **TIGHT)
    assert_everything_happened(traffic)
    assert traffic.engine.scheduler.preemptions > 50


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 44), (16, 3), (64, 1), (3, 200)])
def test_random_operations_with_other_blocks(block_size: int, num_blocks: int) -> None:
    assert_everything_happened(
        random_traffic(
            "phase6_paged", 2500, seed=2, kind=PagedTraffic, block_size=block_size, num_blocks=num_blocks
        )
    )


def test_random_operations_on_the_contiguous_backend() -> None:
    traffic = random_traffic("phase6_paged", 5000, seed=3, kv_cache_backend="contiguous")
    assert_everything_happened(traffic)
    assert traffic.engine.scheduler.preemptions == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_random_operations(seed: int) -> None:
    assert_everything_happened(random_traffic("phase6_paged", 20_000, seed, kind=PagedTraffic, **TIGHT))
