"""The traces that pages draw: recorded from phases, valid, and drawn with what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.micro import long_prompt
from docs.building.traces import RESULTS, TRACES, read, trace_pictures
from tests.traces import assert_valid, read_trace, requests_of

PHASES = ("phase6_paged", "phase7_chunked")


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_committed_is_a_trace_of_a_stall_or_of_none(phase: str) -> None:
    path = RESULTS / TRACES / f"long_prompt-{phase}.trace"
    events = read_trace(path.read_bytes())
    assert_valid(events)
    assert len(requests_of(events)) == 4
    drawn = read(path)
    chunks = [what for what, *_ in drawn.spans["long prompt"] if what.startswith("chunk")]
    assert len(chunks) == (1 if phase == "phase6_paged" else 4)
    assert "dummy:llama-60m" in drawn.label


def test_they_are_recorded_and_drawn(tmp_path: Path) -> None:
    results = tmp_path / TRACES
    results.mkdir()
    assert "Not drawn yet" in trace_pictures("long_prompt", *PHASES, results=tmp_path)
    for phase in PHASES:
        name, trace = long_prompt.record(phase, "zoo:llama-tiny", 300)
        assert name == phase
        assert_valid(read_trace(trace))
        (results / f"long_prompt-{phase}.trace").write_bytes(trace)
    drawn = trace_pictures("long_prompt", *PHASES, results=tmp_path)
    assert drawn.count("chunk 0:300,") == 1
    assert drawn.count("chunk 0:256,") == drawn.count("chunk 256:300,") == 1
    for name in ("decodes 1", "decodes 2", "decodes 3", "long prompt"):
        assert drawn.count(f">{name}</text>") == 2
    assert "Recorded: zoo:llama-tiny, " in drawn
