"""Decode steps on the best device: which of them are timed."""

from __future__ import annotations

from typing import cast

import pytest

from benchmarks.micro import on_device
from benchmarks.micro.on_device import Loaded, covered, decode, prompts_of
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


class CountedPasses:
    """Counts the passes that are launched between `start` and `stop`, in place of kernels."""

    def __init__(self, launched: list[StepPlan]) -> None:
        self._launched = launched
        self.seen: list[StepPlan] = []
        self.passes = 0

    def start(self) -> None:
        self._from = len(self._launched)

    def stop(self) -> None:
        self.seen += self._launched[self._from :]


@pytest.mark.parametrize(
    ("phase", "model", "passes"),
    [("8", "zoo:llama-tiny", {2}), ("9", "zoo:llama-tiny", {2}), ("10", "dummy:llama-1m", {1, 2})],
)
def test_the_passes_of_the_counted_steps_are_counted(
    phase: str, model: str, passes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In phase 10, guesses may begin to pay in one of these steps. It launches nothing: tokens are read first."""
    loaded = Loaded.of(model, "float32", 24)
    engine = loaded.engine(
        phase, max_batch_size=1, max_seq_len=24, enable_prefix_caching=False, draft_length=1
    )
    launched: list[StepPlan] = []
    name = "launch" if phase == "8" else "launch_forward"
    launch = getattr(engine.runner, name)
    monkeypatch.setattr(engine.runner, name, lambda plan: (launched.append(plan), launch(plan))[1])
    counter = CountedPasses(launched)
    decode(engine, prompts_of(1, 8, 1000), 16, counter=cast(on_device.KernelCounter, counter))
    assert counter.passes == len(counter.seen)
    assert counter.passes in passes
    assert all(len(plan.decode) == 1 and not plan.prefill for plan in counter.seen)


def test_time_in_which_kernels_overlap_counts_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0
