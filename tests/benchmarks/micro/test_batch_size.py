"""Steps by batch size: the counted bytes and operations, and that every row of the table is measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks.micro.batch_size import Machine, Work, work_of
from benchmarks.micro.passes import CONTEXT, load_as_served


def test_the_work_of_a_step_is_counted_by_hand() -> None:
    model = load_as_served("zoo:llama-tiny", torch.float32, CONTEXT + 1)
    config = model.config
    hidden, heads, kv_heads, size = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    layer = (
        hidden * (heads + 2 * kv_heads) * size + heads * size * hidden + 3 * hidden * config.intermediate_size
    )
    weights = config.num_layers * layer + hidden * config.vocab_size
    columns = 3 * (CONTEXT + 1)
    found = work_of(model, 3)
    assert found.bytes == 4 * weights + columns * config.num_layers * 2 * kv_heads * size * 4
    assert found.operations == 2 * 3 * weights + columns * config.num_layers * 4 * heads * size


def test_bounds_are_times() -> None:
    assert Work(bytes=2e9, operations=6e9).bounds_ms(Machine(1e10, 1e12)) == pytest.approx((200.0, 6.0))
