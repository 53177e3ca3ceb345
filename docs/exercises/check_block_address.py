"""Compares `address_of` with where phase 6's pool really writes, after blocks have changed hands."""

from __future__ import annotations

import pytest
import torch
from block_address import address_of

import phase6_paged
from common.kv import KVShape, Span
from common.request import Request, SamplingParams
from phase6_paged.cache import PagedKVCachePool


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_column_is_where_the_pool_writes_it(block_size: int) -> None:
    config = phase6_paged.Config(max_seq_len=64, block_size=block_size, num_blocks=128 // block_size)
    pool = PagedKVCachePool(config, KVShape(1, 1, 1, torch.float32), torch.device("cpu"))
    requests = [Request(f"r{i}", [0] * tokens, SamplingParams()) for i, tokens in enumerate((20, 33, 7))]
    for request in requests:
        assert pool.reserve(request, request.num_prompt_tokens)
    pool.release(requests[0])  # its blocks go to the next, out of order
    latest = Request("latest", [0] * 50, SamplingParams())
    assert pool.reserve(latest, 50)
    assert latest.slot is not None
    addresses = pool.view([Span.exact(latest.slot, 0, 50)]).layout.write_addresses.tolist()
    table = pool.block_table(latest.slot)
    assert addresses == [address_of(column, table, block_size) for column in range(50)]
