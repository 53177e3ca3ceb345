"""Steps at each depth: every way steps as it says."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import benchmarks.__main__ as command_line
from benchmarks.micro import pipeline
from benchmarks.micro.pipeline import BUSY, WAYS
from common.streams import TapeStream, ThreadStream
from kernels import native
from tests.phase9_pipelined.support import runner_of

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


def test_a_busy_thread_is_there_while_it_is_measured_and_gone_after(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline.start("depth 2, played", MODEL, 1)
    before, seen = set(threading.enumerate()), []
    decode = pipeline.decode
    monkeypatch.setattr(
        pipeline, "decode", lambda *args: [seen.append(threading.enumerate()), *decode(*args)][1:]
    )
    assert pipeline.step_ms(1, busy=True) > 0
    (threads,) = seen
    (busy,) = set(threads) - before
    assert not busy.is_alive()
    assert set(BUSY) <= set(WAYS)


def test_the_tables_have_a_row_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {way: float(i + 1) for i, way in enumerate(WAYS)}
    monkeypatch.setattr(pipeline, "measure", lambda *_: (times, {way: times[way] for way in BUSY}))
    command_line.main(
        ["micro", "pipeline", "--models", MODEL, "--sequences", "1", "8", "--out", str(tmp_path)]
    )
    table = json.loads((tmp_path / "tables" / "pipeline.json").read_text())
    ratio = times["depth 0, played"] / times["depth 2, played"]
    assert table["rows"] == [[MODEL, n, *times.values(), ratio] for n in (1, 8)]
    busy = json.loads((tmp_path / "tables" / "pipeline_busy.json").read_text())
    assert busy["rows"] == [[MODEL, n, *(times[way] for way in BUSY)] for n in (1, 8)]
