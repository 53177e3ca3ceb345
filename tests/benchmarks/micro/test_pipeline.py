"""What measures running ahead: every way steps as it says, and a trace has all its parts."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import benchmarks.__main__ as command_line
from benchmarks.micro import pipeline
from benchmarks.micro.pipeline import BUSY, WAYS, Traced, busy_share
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


@pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here")
@pytest.mark.parametrize("depth", [0, 2])
def test_a_trace_has_the_hosts_parts_and_the_streams(depth: int) -> None:
    pipeline.start(f"depth {depth}, played", MODEL, 2)
    spans = pipeline.trace(2, 5)
    assert {(lane, what) for lane, what, *_ in spans} == {
        *(("host", what) for what in ("plan", "launch", "wait", "commit")),
        *(("stream", what) for what in ("forward", "sample")),
    }
    for _, _, began, ended in spans:
        assert isinstance(began, float)
        assert isinstance(ended, float)
        assert 0 <= began <= ended
    forwards = [(began, ended) for _, what, began, ended in spans if what == "forward"]
    commits = [began for _, what, began, _ in spans if what == "commit"]
    # Five steps of the host's, before which and after which the stream may be as far ahead as the pipeline is deep.
    assert abs(len(forwards) - 5) <= max(1, depth)
    if depth == 0:  # nothing computes while the host reads
        assert not any(began < commit < ended for began, ended in forwards for commit in commits)


@pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here")
def test_with_a_grammar_masks_are_filled_while_the_next_pass_computes() -> None:
    pipeline.start("depth 2, played", MODEL, 2)
    spans = pipeline.trace(2, 5, pipeline.LETTERS)
    launches = [span for span in spans if span.what == "launch"]
    masks = [span for span in spans if span.what == "mask"]
    assert abs(len(masks) - 5) <= 1
    for mask in masks:
        assert any(each.from_ms <= mask.from_ms <= mask.to_ms <= each.to_ms for each in launches)


def test_a_stream_that_does_two_things_at_once_is_busy_once() -> None:
    times = [(1.0, 3.0), (2.0, 4.0), (2.5, 2.6), (6.0, 9.0)]
    spans = [Traced("stream", "forward", *each) for each in times]
    assert busy_share([*spans, Traced("host", "wait", 0.0, 10.0)]) == pytest.approx(60)


@pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here")
def test_the_trace_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [Traced("host", "plan", 0.0, 1.0), Traced("stream", "forward", 0.5, 2.0)]
    runs = (MODEL, f"{MODEL}, with a grammar")
    rows = [[each, depth, *span] for each in runs for depth in (0, 2) for span in spans]
    monkeypatch.setattr(pipeline, "in_new_process", lambda traced, *of: spans)
    command_line.main(["micro", "pipeline_trace", "--models", MODEL, "--out", str(tmp_path)])
    table = json.loads((tmp_path / "tables" / "pipeline_trace.json").read_text())
    assert table["rows"] == rows
    assert table["setup"][f"{MODEL}, depth 2, stream busy"] == "75 %"


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
