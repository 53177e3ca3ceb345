"""Random histories: requests come, are cancelled and fail while two steps are in flight, in little memory."""

from __future__ import annotations

from typing import Any

import pytest

from phase9_pipelined.state import MAX_IN_FLIGHT
from tests.phase8_prefix.support import assert_shared_consistently, caching
from tests.phase9_pipelined.support import ManualStream, runner_of
from tests.traffic import Traffic, assert_everything_happened, random_traffic, state_machine


class PipelinedTraffic(Traffic):
    """On a stream that does its work when somebody waits for it, or a little earlier."""

    def __init__(self, phase: str, **options: Any) -> None:
        super().__init__(phase, **options)
        self.stream = ManualStream()
        runner_of(self.engine).stream = self.stream
        self.most_in_flight = 0

    def step(self, guilty: int | None = None) -> None:
        if self.operations % 3 == 0:
            self.stream.finish()
        super().step(guilty)

    def check(self) -> None:
        super().check()
        assert_shared_consistently(caching(self.engine))
        state = runner_of(self.engine).state
        self.most_in_flight = max(self.most_in_flight, len(state.steps))
        members = [member for step in state.steps for member in step.members]
        for request in self.live.values():
            assert request.inflight_refs == members.count(request) <= MAX_IN_FLIGHT
            assert 0 <= request.pending_tokens <= request.inflight_refs
        assert state.launched is None


TIGHT: dict[str, Any] = {"block_size": 4, "num_blocks": 12, "prefill_chunk_size": 3}

TestPipelinedTraffic = state_machine("phase9_pipelined", 40, 50, PipelinedTraffic, **TIGHT)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_mode": "drained"},
        {"pipeline_depth": 1},
        {"pipeline_depth": 0},
        {"mixed_batches": False},
        {"use_chunked_prefill": False, "prefill_chunk_size": 256},
        {"prefill_token_budget": None},
        {"block_size": 1, "num_blocks": 44, "prefill_chunk_size": 1},
    ],
    ids=str,
)
def test_random_operations_in_a_tight_pool(options: dict[str, Any]) -> None:
    traffic = random_traffic("phase9_pipelined", 2500, 1, PipelinedTraffic, **(TIGHT | options))
    assert_everything_happened(traffic)
    assert isinstance(traffic, PipelinedTraffic)
    assert traffic.most_in_flight == options.get("pipeline_depth", MAX_IN_FLIGHT)
    assert traffic.engine.telemetry.counters.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_random_operations(seed: int) -> None:
    assert_everything_happened(random_traffic("phase9_pipelined", 20_000, seed, PipelinedTraffic, **TIGHT))
