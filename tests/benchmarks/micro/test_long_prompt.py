"""The traces of a long prompt: recorded from phases and valid, with the chunks that each phase makes."""

from __future__ import annotations

import pytest

from benchmarks.micro import long_prompt
from benchmarks.micro.long_prompt import TRACES
from docs.building.results import RESULTS
from tests.traces import assert_valid, read_trace, requests_of

ENDS = {"phase6_paged": [1000], "phase7_chunked": [256, 512, 768, 1000]}


def chunks_of(trace: bytes) -> list[str]:
    """Return the names of the long prompt's chunks."""
    events = read_trace(trace)
    assert_valid(events)
    tracks = [[e["name"] for e in track if e["ph"] == "b"] for track in requests_of(events).values()]
    assert sorted(names[0] for names in tracks) == ["decodes 1", "decodes 2", "decodes 3", "long prompt"]
    [long] = [names for names in tracks if names[0] == "long prompt"]
    return [name for name in long if name.startswith("chunk")]


@pytest.mark.parametrize("phase", ENDS)
def test_what_is_committed_is_a_trace_of_a_stall_or_of_none(phase: str) -> None:
    trace = (RESULTS / TRACES / f"long_prompt-{phase}.trace").read_bytes()
    assert chunks_of(trace) == [
        f"chunk {a}:{b}" for a, b in zip([0, *ENDS[phase]], ENDS[phase], strict=False)
    ]


def test_they_are_recorded() -> None:
    traces = dict(long_prompt.record(phase, "zoo:llama-tiny", 300) for phase in ENDS)
    assert chunks_of(traces["phase6_paged"]) == ["chunk 0:300"]
    assert chunks_of(traces["phase7_chunked"]) == ["chunk 0:256", "chunk 256:300"]
