"""What a step costs on the host: every part is timed, and nothing twice."""

from __future__ import annotations

import pytest

from benchmarks import host_cost
from benchmarks.host_cost import PARTS, step_times
from common.request import SamplingParams


@pytest.mark.parametrize("phase", ["phase4_static", "phase7_chunked"])
def test_the_parts_are_of_one_step_and_of_different_work(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that counts how often it is asked, a part's time is the number of calls that are timed in it."""
    asked = [0.0]

    def clock() -> float:
        asked[0] += 1.0
        return asked[0]

    monkeypatch.setattr(host_cost, "STEPS", 6)
    monkeypatch.setattr(host_cost.time, "perf_counter", clock)
    times = step_times(phase, 3, SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True))
    # retire, make_room, admit, plan and release; passes and prepare; one sampling; one commit
    assert {part: round(times[part] / 1e3) for part in PARTS} == {
        "scheduling": 5,
        "metadata": 2,
        "sampling": 1,
        "commit": 1,
    }
    assert times["step"] / 1e3 == 2 * 9 + 1
