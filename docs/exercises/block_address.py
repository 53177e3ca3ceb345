"""Exercise: where does a column lie?

Write `address_of`, then run `.venv/bin/pytest docs/exercises/block_address.py`.
The check compares its addresses with those that phase 6's pool writes to, after blocks were freed and reused.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import phase6_paged
from common.kv import KVShape, Span
from common.request import Request, SamplingParams
from phase6_paged.cache import PagedKVCachePool


def address_of(column: int, table: Sequence[int], block_size: int) -> int:
    """Return the address of a sequence's column in the flat store.

    All blocks lie one after the other: block 0 has addresses 0 to block_size - 1, block 1 the next block_size.

    Args:
        column: the index of a token in its sequence.
        table: the sequence's blocks, in the order of its columns.
        block_size: the number of columns in a block.
    """
    raise NotImplementedError("a block, and an offset in it")


# ---------------------------------------------------------------------- the check


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_column_is_where_the_pool_writes_it(block_size: int) -> None:
    config = phase6_paged.Config(max_seq_len=64, block_size=block_size, num_blocks=128 // block_size)
    pool = PagedKVCachePool(config, KVShape(1, 1, 1, torch.float32), torch.device("cpu"))
    requests = [Request(f"r{i}", [0] * tokens, SamplingParams()) for i, tokens in enumerate((20, 33, 7))]
    for request in requests:
        assert pool.reserve(request, request.num_prompt_tokens)
    pool.release(requests[0])  # the next request gets its blocks, out of order
    latest = Request("latest", [0] * 50, SamplingParams())
    assert pool.reserve(latest, 50)
    assert latest.slot is not None
    addresses = pool.view([Span.exact(latest.slot, 0, 50)]).layout.write_addresses.tolist()
    table = pool.block_table(latest.slot)
    assert addresses == [address_of(column, table, block_size) for column in range(50)]


# ---------------------------------------------------------------------- one way to solve it


def solution(column: int, table: Sequence[int], block_size: int) -> int:
    """Add the offset in the block to the block's first address."""
    return table[column // block_size] * block_size + column % block_size
