"""Shared blocks in random histories: users are counted, and blocks add up."""

from __future__ import annotations

import pytest

from tests.phase8_prefix.support import Sharing, act, make_pool, run_down

POOLS = [(24, 1), (14, 2), (10, 3), (9, 4), (12, 4)]  # blocks, block size


def random_history(num_blocks: int, block_size: int, operations: int, seed: int) -> Sharing:
    sharing = Sharing(make_pool(num_blocks, block_size), seed)
    for _ in range(operations):
        act(sharing)
    run_down(sharing)
    return sharing


@pytest.mark.parametrize(("num_blocks", "block_size"), POOLS)
def test_10_000_operations(num_blocks: int, block_size: int) -> None:
    sharing = random_history(num_blocks, block_size, 10_000 // len(POOLS), seed=num_blocks)
    assert min(sharing.hits, sharing.evicted) > 100
    assert sharing.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "block_size"), POOLS)
def test_100_000_operations(num_blocks: int, block_size: int) -> None:
    sharing = random_history(num_blocks, block_size, 100_000 // len(POOLS), seed=block_size)
    assert min(sharing.hits, sharing.evicted) > 1000
    assert min(sharing.preemptions, sharing.twins) > 10
