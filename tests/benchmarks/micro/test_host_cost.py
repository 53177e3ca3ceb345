"""The host's time of a step: every part is timed, and none twice."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.micro import host_cost
from benchmarks.micro.host_cost import PARTS, step_times
from common.engine.engine import Engine


@pytest.mark.parametrize("phase", ["phase4_static", "phase7_chunked"])
def test_the_parts_are_of_one_step_and_of_different_work(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock adds a second at each reading, so a part takes one second if it contains no other part."""
    build = host_cost.engine_without_passes

    def counting(*arguments: object) -> Engine:
        engine = build(*arguments)  # type: ignore[arg-type]
        ticks = itertools.count()
        engine.clock = lambda: float(next(ticks))
        return engine

    monkeypatch.setattr(host_cost, "engine_without_passes", counting)
    times = step_times(phase, 3, new_tokens=6)
    assert {part: times[part] / 1e3 for part in PARTS.values()} == dict.fromkeys(PARTS.values(), 1.0)
    assert times["step"] / 1e3 > len(PARTS)
