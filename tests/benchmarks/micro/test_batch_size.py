"""Steps by batch size: the counted bytes and operations, and that every row of the table is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks.micro import batch_size
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


def test_every_row_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("READ_BYTES", 2**20), ("PEAK_ROWS", 8), ("PEAK_SIZE", 128)):
        monkeypatch.setattr(batch_size, name, small)
    options = ["--model", "zoo:llama-tiny", "--rows", "1", "3", "--repeats", "1", "--out", str(tmp_path)]
    assert command_line.main(["micro", "batch_size", *options]) == 0
    table = json.loads((tmp_path / "tables" / "batch_size.json").read_text())
    assert [row[0] for row in table["rows"]] == [1, 3]
    for rows, step, share, rate, reading, arithmetic, over in table["rows"]:
        assert min(step, reading, arithmetic) > 0
        assert share == pytest.approx(step / rows)
        assert rate == pytest.approx(1e3 / share)
        assert over == pytest.approx(step / max(reading, arithmetic))
