"""Options of phase 6: the sizes that they give, and warnings."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.engines import Variant, add, assert_served, greedy


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"max_batch_size": 8, "max_seq_len": 4096}, 8 * 256),
        ({"max_batch_size": 3, "max_seq_len": 10, "block_size": 4}, 8),  # 30 tokens, rounded up
        ({"max_batch_size": 8, "max_seq_len": 8192}, 8 * 256),  # longer sequences share the blocks
        ({"max_batch_size": 2, "max_seq_len": 16_384}, 1024),  # and one fits in any case
        ({"max_batch_size": 24, "max_seq_len": 2048, "num_blocks": 2048}, 2048),
        ({"max_batch_size": 1, "max_seq_len": 100, "num_blocks": 1}, 1),
    ],
)
def test_blocks_default_to_the_bytes_of_phase_5(
    variant: Variant, options: dict[str, Any], blocks: int
) -> None:
    config = variant.config(**options)
    assert config.resolve_num_blocks() == blocks
    assert config.kv_tokens() == blocks * config.block_size
    assert config.kv_formula() == f"{blocks} blocks × {config.block_size}"


def test_slots_ignore_the_block_options(variant: Variant) -> None:
    options = {"kv_cache_backend": "contiguous", "max_batch_size": 3, "max_seq_len": 50}
    for config in (variant.config(**options), variant.config(**options, block_size=7, num_blocks=1)):
        assert (config.kv_tokens(), config.kv_formula()) == (150, "3 × 50")


def test_a_pool_smaller_than_one_sequence_is_legal_and_said(
    variant: Variant, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = variant.build(num_blocks=3, block_size=4, max_seq_len=64)
    assert [record.getMessage() for record in caplog.records] == [
        "3 blocks of 4 hold 12 tokens: less than one sequence of 64; longer requests are refused"
    ]
    request = add(engine, b"abcdef", greedy(6))
    assert_served(engine, [request])
