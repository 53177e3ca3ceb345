"""With a cache and without: the same answer, and how much is computed for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks.micro import kv_cache
from benchmarks.micro.kv_cache import answer
from benchmarks.micro.passes import load_as_served


def test_both_ways_give_the_same_answer_and_one_computes_everything_again() -> None:
    model = load_as_served("zoo:llama-tiny", torch.float32, 64)
    prompt = [5, 17, 90, 44]
    kept, again = (answer(model, prompt, 6, cached=cached) for cached in (True, False))
    assert kept.token_ids == again.token_ids
    assert len(kept.token_ids) == kept.passes == again.passes == 6
    assert kept.computed_tokens == 4 + 5  # the prompt, then a token a pass; the last one is never computed
    assert again.computed_tokens == 4 + 5 + 6 + 7 + 8 + 9


def test_both_tables_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "PROMPT_TOKENS", 4)
    monkeypatch.setattr(kv_cache, "NEW_TOKENS", 5)
    options = ["--model", "zoo:llama-tiny", "--repeats", "1", "--out", str(tmp_path)]
    assert command_line.main(["micro", "kv_cache", "--lengths", "3", "9", *options]) == 0
    assert command_line.main(["micro", "kv_cache_answer", *options]) == 0
    steps = json.loads((tmp_path / "tables" / "kv_cache.json").read_text())["rows"]
    assert [row[0] for row in steps] == [3, 9]
    assert all(kept > 0 and ratio == pytest.approx(again / kept) for _, kept, again, ratio, _ in steps)
    answers = json.loads((tmp_path / "tables" / "kv_cache_answer.json").read_text())["rows"]
    assert [(row[0], row[1], row[5]) for row in answers] == [("with the cache", 5, 5), ("without", 5, 5)]
