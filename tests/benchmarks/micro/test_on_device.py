"""Decode steps on the best device: which of them are timed."""

from __future__ import annotations

import pytest

from benchmarks.micro import on_device
from benchmarks.micro.on_device import Loaded, decode
from common.engine.scheduling import StepPlan


@pytest.mark.parametrize("phase", ["8", "9", "10"])
def test_no_timed_step_launches_a_pass_of_fewer_sequences(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk holds one prompt, so sequences begin, and end, one after the other."""
    clock = 0.0
    monkeypatch.setattr(on_device.time, "perf_counter", lambda: clock)
    loaded = Loaded.of("zoo:llama-tiny", "float32", 48)
    engine = loaded.engine(
        phase, max_batch_size=4, max_seq_len=48, prefill_chunk_size=16, enable_prefix_caching=False
    )
    execute = engine.runner.execute

    def timed(plan: StepPlan) -> object:
        nonlocal clock
        clock += 1.0 if len(plan.decode) == 4 else 100.0
        return execute(plan)

    monkeypatch.setattr(engine.runner, "execute", timed)
    found = decode(engine, [[5 + n] * 16 for n in range(4)], 24)
    assert len(found.seconds) > 8
    assert set(found.seconds) == {1.0}
