"""`use_chunked_prefill = False` is phase 6: the same plans, the same passes, and phase 6's suite."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

import phase7_chunked
import tests.phase6_paged.test_memory_pressure as phase6_pressure
import tests.phase6_paged.test_paged_config as phase6_config
import tests.phase6_paged.test_paged_runner as phase6_runner
import tests.phase6_paged.test_paged_scheduler as phase6_scheduler
from common.engine import Engine
from common.request import SamplingParams, StepOutput
from common.scheduling import StepPlan
from tests.engine_helpers import RememberingModel, build, greedy
from tests.phase6_paged.support import collect

MODULES = (phase6_pressure, phase6_config, phase6_runner, phase6_scheduler)
LONG = {"test_memory_pressure__every_size_from_ample_to_the_smallest"}

# Each test keeps its marks and fixtures, and finds phase 7's parts where its module had imported phase 6's.
globals().update({name: test for name, test in collect(*MODULES).items() if name not in LONG})


@pytest.fixture(autouse=True)
def without_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = functools.partial(phase7_chunked.Config, use_chunked_prefill=False)

    def build_without_chunks(phase: str, *args: Any, **options: Any) -> Engine:
        assert phase == "phase6_paged"
        return build("phase7_chunked", *args, use_chunked_prefill=False, **options)

    for module in MODULES:
        monkeypatch.setattr(module, "build", build_without_chunks)
        if hasattr(module, "Config"):
            monkeypatch.setattr(module, "Config", config)


def test_the_suite_is_here() -> None:
    collected = [name for name in globals() if "__" in name and name.startswith("test_")]
    assert len(collected) > 50


def describe(plan: StepPlan) -> Any:
    return (
        [r.request_id for r in plan.decode],
        [(c.request.request_id, c.start, c.end) for c in plan.prefill],
    )


def trace(engine: Engine, seed: int) -> tuple[list[Any], list[Any], list[list[StepOutput]]]:
    """Random traffic, cancellations among it: plans, passes as the model saw them, and what each step said."""
    plans: list[Any] = []
    execute = engine.runner.execute

    def recorded(plan: StepPlan) -> list[StepOutput]:
        plans.append(describe(plan))
        return execute(plan)

    engine.runner.execute = recorded  # type: ignore[method-assign]
    rng = random.Random(seed)
    told: list[list[StepOutput]] = []
    for _ in range(150):
        if rng.random() < 0.5:
            new = rng.randint(1, 20)
            params: SamplingParams = greedy(new)
            engine.add_request(engine.create_request([rng.randrange(250)] * rng.randint(1, 40), params))
        if rng.random() < 0.05:
            engine.cancel(f"request-{rng.randrange(60)}")
        told.append(engine.step())
    while engine.has_work:
        told.append(engine.step())
    model = engine.runner.model
    assert isinstance(model, RememberingModel)
    return plans, model.calls, told


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "num_blocks": 200},
        {"block_size": 2, "num_blocks": 34},
        {"kv_cache_backend": "contiguous"},
        {"block_size": 4, "max_prefill_pass_tokens": 20},
    ],
    ids=["ample", "tight", "contiguous", "small-passes"],
)
def test_plans_and_passes_are_phase_6s(options: dict[str, Any], seed: int) -> None:
    six = build("phase6_paged", **options)
    seven = build("phase7_chunked", use_chunked_prefill=False, **options)
    plans, calls, told = trace(six, seed)
    assert trace(seven, seed) == (plans, calls, told)
    assert seven.scheduler.preemptions == six.scheduler.preemptions
    assert (six.scheduler.preemptions > 0) == (options.get("num_blocks") == 34)
    assert len(calls) > 150


@pytest.mark.parametrize("seed", range(2))
def test_with_chunks_the_trace_is_another(seed: int) -> None:
    """Or the test above would prove nothing."""
    plans, _, _ = trace(build("phase6_paged"), seed)
    chunked, _, _ = trace(build("phase7_chunked", prefill_chunk_size=8), seed)
    assert chunked != plans
