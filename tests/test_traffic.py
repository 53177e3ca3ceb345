"""Random histories of an engine of each phase: no memory is leaked or shared by mistake, no request ends twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from common.request import Request
from common.startup.phases import find_phase, phase_names
from phase9_pipelined import Runner
from phase9_pipelined.state import MAX_IN_FLIGHT
from tests.support.engines import Variant
from tests.support.streams import ManualStream, by_rule, let_guess
from tests.support.traffic import Traffic, answer, assert_everything_happened, random_traffic

#: Memory for little more than one sequence of 40 tokens. A phase gets those of the options that it has.
TIGHT: dict[str, Any] = {"block_size": 4, "num_blocks": 12, "prefill_chunk_size": 3}


def tight(phase: str, **options: Any) -> Variant:
    return Variant.of(phase, **(TIGHT | options))


PHASES = [tight(phase) for phase in phase_names()]
SLOTS = {"kv_cache_backend": "contiguous"}
#: One more form of each option that changes how memory is reserved, prompts are cut, or steps run ahead.
OTHERS = [
    Variant("phase5_continuous", {"max_prefill_pass_tokens": 1}),
    *(Variant("phase6_paged", {"block_size": size, "num_blocks": n}) for size, n in ((1, 44), (64, 1))),
    Variant("phase6_paged", SLOTS),
    tight("phase7_chunked", prefill_token_budget=6),
    tight("phase7_chunked", mixed_batches=False, prefill_token_budget=None, max_prefill_chunks_per_step=2),
    Variant("phase7_chunked", SLOTS | {"prefill_chunk_size": 5}),
    tight("phase8_prefix", block_size=1, num_blocks=44, prefill_chunk_size=1),
    tight("phase8_prefix", mixed_batches=False, prefill_token_budget=None),
    tight("phase9_pipelined", prefill_mode="drained"),
    tight("phase9_pipelined", use_chunked_prefill=False, prefill_chunk_size=256),
    *(tight("phase9_pipelined", pipeline_depth=depth) for depth in (1, 0)),
    tight("phase10_speculative", draft_rows=64, draft_length=15),
    tight("phase10_speculative", pipeline_depth=0),
]


class PipelinedTraffic(Traffic):
    """Traffic on a stream that computes when the host waits for it, and before every third step."""

    def __init__(self, phase: str, **options: Any) -> None:
        super().__init__(phase, **options)
        runner = self.engine.runner
        assert isinstance(runner, Runner)
        self.stream = runner.stream = ManualStream()
        self.state = runner.state
        self.most_in_flight = 0

    def step(self, guilty: int | None = None) -> None:
        if self.operations % 3 == 0:
            self.stream.finish()
        super().step(guilty)

    def check(self) -> None:
        super().check()
        self.most_in_flight = max(self.most_in_flight, len(self.state.steps))
        members = [member for step in self.state.steps for member in step.members]
        for request in self.live.values():
            assert request.inflight_refs == members.count(request) <= MAX_IN_FLIGHT
            assert 0 <= request.pending_tokens <= request.inflight_refs
        assert self.state.launched is None


class SpeculativeTraffic(PipelinedTraffic):
    """Every fourth guess is wrong, drafters of every third request raise at times, some steps have no guesses."""

    def __init__(self, phase: str, **options: Any) -> None:
        super().__init__(phase, **({"draft_rows": 8} | options))
        right = by_rule(answer, wrong_at=lambda place: place % 4 == 0)

        def guess(request: Request, token_ids: Sequence[int], limit: int) -> list[int]:
            if request.arrival % 3 == 0 and len(token_ids) % 2:
                raise RuntimeError("told to fail")
            return right(request, token_ids, limit) if len(token_ids) % 5 else []

        let_guess(self.engine, guess)


def traffic_of(variant: Variant) -> Traffic:
    if "draft_rows" in find_phase(variant.phase).Config.model_fields:
        return SpeculativeTraffic(variant.phase, **variant.options)
    pipelined = "pipeline_depth" in find_phase(variant.phase).Config.model_fields
    return (PipelinedTraffic if pipelined else Traffic)(variant.phase, **variant.options)


@pytest.mark.parametrize(
    ("variant", "operations", "seed"),
    [
        *((variant, 2000, 1) for variant in PHASES),
        *(pytest.param(variant, 2000, 2, marks=pytest.mark.slow) for variant in OTHERS),
        pytest.param(PHASES[1], 20_000, 3, marks=pytest.mark.slow),  # as many as phase 5 was to stand
        *(pytest.param(each, 6000, 3, marks=pytest.mark.slow) for each in (PHASES[0], *PHASES[2:])),
    ],
    ids=str,
)
def test_random_operations(variant: Variant, operations: int, seed: int) -> None:
    traffic = traffic_of(variant)
    if variant.phase != "phase4_static":  # it has no priorities
        traffic.priorities = (0, 3, -1, 0, 1)
    random_traffic(traffic, operations, seed)
    assert_everything_happened(traffic)
    counters = traffic.engine.telemetry.counters
    if variant.options.get("num_blocks") in (10, 12, 44):
        assert counters.preemptions > 0
    if "enable_prefix_caching" in find_phase(variant.phase).Config.model_fields:
        assert counters.evictions > 5
        assert counters.cached_tokens > counters.prompt_tokens / 20
    if isinstance(traffic, PipelinedTraffic):
        assert traffic.most_in_flight == variant.options.get("pipeline_depth", MAX_IN_FLIGHT)
    if isinstance(traffic, SpeculativeTraffic):
        assert min(counters.failed_drafters, counters.accepted_tokens) > 20
        assert counters.draft_tokens > counters.accepted_tokens + 20
