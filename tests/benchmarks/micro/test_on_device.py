"""Decode steps on the best device: which of them are timed."""

from __future__ import annotations

from typing import cast

import pytest

from benchmarks.micro import on_device
from benchmarks.micro.on_device import Loaded, covered, decode
from common.scheduling import StepPlan


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


class CountedPasses:
    """Counts the passes that are launched between `start` and `stop`, in place of kernels."""

    def __init__(self, launched: list[StepPlan]) -> None:
        self._launched = launched
        self.seen: list[StepPlan] = []

    def start(self) -> None:
        self._from = len(self._launched)

    def stop(self) -> None:
        self.seen += self._launched[self._from :]


@pytest.mark.parametrize("phase", ["8", "9"])
def test_as_many_passes_are_counted_as_steps(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded.of("zoo:llama-tiny", "float32", 48)
    engine = loaded.engine(phase, max_batch_size=2, max_seq_len=48, enable_prefix_caching=False)
    launched: list[StepPlan] = []
    name = "launch_forward" if phase == "9" else "launch"
    launch = getattr(engine.runner, name)
    monkeypatch.setattr(engine.runner, name, lambda plan: (launched.append(plan), launch(plan))[1])
    counter = CountedPasses(launched)
    decode(engine, [[5 + n] * 16 for n in range(2)], 24, counter=cast(on_device.KernelCounter, counter))
    assert len(counter.seen) == on_device.COUNTED_STEPS
    assert all(len(plan.decode) == 2 and not plan.prefill for plan in counter.seen)


def test_time_in_which_kernels_overlap_counts_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0
