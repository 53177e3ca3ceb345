"""Decode steps at each pipeline depth: every variant runs with its own options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.__main__ as command_line
from benchmarks.micro import pipeline
from benchmarks.micro.pipeline import WAYS
from common.devices.streams import TapeStream, ThreadStream
from kernels import native
from tests.support.streams import runner_of

MODEL = "zoo:llama-tiny"


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_what_it_says(way: str) -> None:
    pipeline.start(way, MODEL, 2)
    steps = list(pipeline.decode(2, new_tokens=12))
    assert len(steps) >= 10
    assert min(steps) > 0
    if way == "phase 8":
        return
    runner = runner_of(pipeline._engine)
    assert f"depth {runner.config.pipeline_depth}" in way
    played = "played" in way and native.is_loaded()
    assert isinstance(runner.stream, TapeStream if played else ThreadStream)


def test_the_table_has_a_row_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {way: float(i + 1) for i, way in enumerate(WAYS)}
    monkeypatch.setattr(pipeline, "measure", lambda *_: times)
    command_line.main(
        ["micro", "pipeline", "--models", MODEL, "--sequences", "1", "8", "--out", str(tmp_path)]
    )
    table = json.loads((tmp_path / "tables" / "pipeline.json").read_text())
    ratio = times["depth 0, played"] / times["depth 2, played"]
    assert table["rows"] == [[MODEL, n, *times.values(), ratio] for n in (1, 8)]
