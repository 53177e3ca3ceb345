"""Pools of small blocks with shuffled free lists, and the invariants that hold for them at any time."""

from __future__ import annotations

import itertools
import random

import torch

from common.engine.engine import Engine
from common.kv import KVPool, KVShape
from phase6_paged.cache import PagedKVCachePool
from phase8_prefix.cache import CACHE, PrefixCachingPool

CPU = torch.device("cpu")
SMALLEST = KVShape(1, 1, 1, torch.float32)


def paged(engine: Engine) -> PagedKVCachePool:
    """Return an engine's pool of blocks."""
    assert isinstance(engine.runner.pool, PagedKVCachePool)
    return engine.runner.pool


def caching(engine: Engine) -> PrefixCachingPool:
    """Return an engine's pool of blocks that may be shared."""
    assert isinstance(engine.runner.pool, PrefixCachingPool)
    return engine.runner.pool


def shuffle_free_blocks(pool: PagedKVCachePool, seed: int) -> None:
    """Shuffle the free list, so that later block tables are neither sorted nor contiguous."""
    random.Random(seed).shuffle(pool.allocator._free)


def assert_consistent(pool: KVPool) -> None:
    """Assert that each block is free, cached or held, that nodes count their users, and that no block is leaked."""
    if not isinstance(pool, PagedKVCachePool):
        return  # `tests/test_pool_conformance.py` tests slots
    allocator, tables = pool.allocator, pool._tables
    tree = pool.tree if isinstance(pool, PrefixCachingPool) else None
    nodes = [] if tree is None else [node for _, node in tree.walk()]
    cached = {node.block for node in nodes}
    own = [block for table in tables.values() for block in table if block not in cached]
    everything = sorted([*allocator._free, *(node.block for node in nodes), *own])
    assert everything == list(range(allocator.num_blocks)), "a block is lost, or in two places"
    owners = {block: slot for slot, table in tables.items() for block in table} | dict.fromkeys(cached, CACHE)
    assert allocator._owners == owners
    unused = {node for node in nodes if node.users == 0}
    assert allocator.num_free == len(allocator._free) + len(unused)
    assert allocator.num_free + allocator.num_allocated == allocator.num_blocks
    assert tables.keys() == pool._lengths.keys()
    rows = pool.block_tables.tolist()
    for slot, table in tables.items():
        assert pool.get_seq_len(slot) <= pool.capacity(slot)
        row = rows[pool.seat(slot)]
        assert row[: len(table)] == table
    assert pool.audit_blocks() == set()
    if isinstance(pool, PrefixCachingPool):
        _assert_tree_is_consistent(pool)


def _assert_tree_is_consistent(pool: PrefixCachingPool) -> None:
    nodes = list(pool.tree.walk())
    for depth, node in nodes:
        assert node.users == sum(node in path for path in pool._paths.values())
        assert depth == 0 or (node.parent is not None and node.parent.users >= node.users)
    assert set(pool.tree._unused) == {node for _, node in nodes if node.users == 0}
    for slot, path in pool._paths.items():
        assert len(path) * pool.block_size <= pool.get_seq_len(slot)
        assert all(node.parent is above for above, node in itertools.pairwise(path))
