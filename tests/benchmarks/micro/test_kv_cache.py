"""The KV cache: both ways give the same answer and are timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks.micro.kv_cache import Text
from benchmarks.micro.passes import load_as_served


def test_both_ways_give_the_same_answer() -> None:
    model = load_as_served("zoo:llama-tiny", torch.float32, 64)
    kept, again = Text(model, 10), Text(model, 10)
    token_ids = [5, 17, 90, 44]
    for start in (0, *range(4, 9)):
        token = kept.next_token(token_ids, start)
        assert token == again.next_token(token_ids, 0)
        token_ids.append(token)


def test_a_row_for_each_length(tmp_path: Path) -> None:
    options = ["--model", "zoo:llama-tiny", "--repeats", "1", "--out", str(tmp_path)]
    assert command_line.main(["micro", "kv_cache", "--lengths", "3", "9", *options]) == 0
    rows = json.loads((tmp_path / "tables" / "kv_cache.json").read_text())["rows"]
    assert [row[0] for row in rows] == [3, 9]
    assert all(kept > 0 and ratio == pytest.approx(again / kept) for _, kept, again, ratio, _ in rows)
