"""A phase whose idea an option switches off is the phase before: the same plans, passes and outputs."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from common.engine.engine import Engine
from common.engine.scheduling import StepPlan
from common.request import SamplingParams, StepOutput
from tests.support.engines import RememberingModel, Variant, greedy, ids

#: Each phase's option, and the phase before.
SWITCHES = {
    "phase6_paged": ({"kv_cache_backend": "contiguous"}, "phase5_continuous"),
    "phase7_chunked": ({"use_chunked_prefill": False}, "phase6_paged"),
    "phase8_prefix": ({"enable_prefix_caching": False}, "phase7_chunked"),
    "phase10_speculative": ({"draft_length": 0}, "phase9_pipelined"),
    "phase11_tiered": ({"kv_tier": None}, "phase10_speculative"),
}
TIGHT = {"block_size": 2, "num_blocks": 34}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("phase6_paged", {}),
    ("phase6_paged", {"max_prefill_pass_tokens": 20}),
    ("phase7_chunked", {"block_size": 4, "num_blocks": 200}),
    ("phase7_chunked", TIGHT),
    ("phase7_chunked", {"kv_cache_backend": "contiguous"}),
    ("phase7_chunked", {"block_size": 8, "num_blocks": 12, "max_prefill_pass_tokens": 20}),
    ("phase8_prefix", {"block_size": 4, "num_blocks": 200, "prefill_chunk_size": 8}),
    ("phase8_prefix", TIGHT | {"prefill_chunk_size": 5}),
    ("phase8_prefix", {"num_blocks": 40, "prefill_token_budget": None, "mixed_batches": False}),
    ("phase8_prefix", {"kv_cache_backend": "contiguous", "prefill_chunk_size": 7}),
    ("phase8_prefix", {"block_size": 8, "num_blocks": 12, "use_chunked_prefill": False}),
    ("phase10_speculative", {"block_size": 4, "num_blocks": 200}),
    ("phase10_speculative", TIGHT | {"pipeline_depth": 1, "prefill_chunk_size": 5}),
    ("phase11_tiered", TIGHT | {"prefill_chunk_size": 5}),
]


def trace(engine: Engine) -> tuple[list[Any], list[Any], list[list[StepOutput]]]:
    """Run random traffic with cancellations. Returns the plans, the model's calls, and the outputs of each step."""
    plans: list[Any] = []
    execute = engine.runner.execute

    def recorded(plan: StepPlan) -> list[StepOutput]:
        plans.append((ids(plan.decode), [(c.request.request_id, c.start, c.end) for c in plan.prefill]))
        return execute(plan)

    engine.runner.execute = recorded  # type: ignore[method-assign]
    draw = random.Random(0)
    told: list[list[StepOutput]] = []
    for _ in range(90):
        if draw.random() < 0.5:
            params: SamplingParams = greedy(draw.randint(1, 20))
            prompt = [draw.randrange(250)] * draw.randint(1, 40)
            engine.add_request(engine.maker.create(prompt, params))
        if draw.random() < 0.05:
            engine.cancel(f"request-{draw.randrange(60)}")
        told.append(engine.step())
    while engine.has_work:
        told.append(engine.step())
    model = engine.runner.model
    assert isinstance(model, RememberingModel)
    assert len(model.calls) > 90
    return plans, model.calls, told


@pytest.mark.parametrize(("phase", "options"), CASES, ids=str)
def test_without_its_idea_a_phase_computes_what_the_phase_before_computes(
    phase: str, options: dict[str, Any]
) -> None:
    switch, before = SWITCHES[phase]
    earlier, later = Variant(before, options).build(), Variant(phase, switch | options).build()
    assert trace(later) == trace(earlier)
    assert later.scheduler.preemptions == earlier.scheduler.preemptions
    assert later.telemetry.counters == dataclasses.replace(
        earlier.telemetry.counters, busy_s=later.telemetry.counters.busy_s
    )
    if options.items() >= TIGHT.items():
        assert later.scheduler.preemptions > 0
