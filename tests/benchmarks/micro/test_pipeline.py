"""Decode steps at each pipeline depth: every variant runs with its own options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.__main__ as command_line
from benchmarks.micro import pipeline
from benchmarks.micro.pipeline import WAYS

MODEL = "zoo:llama-tiny"


def test_the_table_has_a_row_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {way: float(i + 1) for i, way in enumerate(WAYS)}
    monkeypatch.setattr(pipeline, "measure", lambda *_: times)
    command_line.main(
        ["micro", "pipeline", "--models", MODEL, "--sequences", "1", "8", "--out", str(tmp_path)]
    )
    table = json.loads((tmp_path / "tables" / "pipeline.json").read_text())
    ratio = times["depth 0, played"] / times["depth 2, played"]
    assert table["rows"] == [[MODEL, n, *times.values(), ratio] for n in (1, 8)]
