"""A simulated engine has, step for step, the same plans as the real one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from common.engine.engine import Engine
from common.engine.scheduling import StepPlan
from common.engine.telemetry import StepRecord
from common.request import Request, StepOutput
from common.startup.phases import phase_names, phase_number
from simulator import ONE_SECOND_A_PASS, simulate_engine
from simulator.loop import params
from tests.support.engines import Clock, assert_all_free, build

NAMES = {phase_number(name): name for name in phase_names()}
SHARED = list(range(1, 25))  # six blocks that half of the prompts begin with

Coming = list[tuple[int, list[int], int]]  # the step before which a request comes, its prompt, its new tokens


def crowd(seed: int) -> Coming:
    """Return requests in bursts and alone, short and long. Half of them share a prefix."""
    rng = random.Random(seed)
    coming = []
    for index in range(24):
        own = [100 + (index * 7 + place) % 150 for place in range(rng.randint(1, 20))]
        prompt = (SHARED if index % 2 else []) + own
        coming.append((rng.choice((0, 3, 4, 20, 41)), prompt, rng.randint(1, 18)))
    return sorted(coming, key=lambda each: each[0])


class Seen:
    """Records the plan and outputs of each step, in a form in which two engines can be compared."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: list[Any] = []
        engine.watchers.append(self)

    def __call__(self, record: StepRecord, plan: StepPlan, outputs: Sequence[StepOutput]) -> None:
        pool = self.engine.runner.pool
        counts = {
            name: getattr(record, name) for name in StepRecord.__slots__ if not name.endswith("_s")
        }  # all counts, without times
        self.steps.append(
            (
                [request.request_id for request in plan.decode],
                [(chunk.request.request_id, chunk.start, chunk.end) for chunk in plan.prefill],
                [(output.request_id, output.finish_reason, output.cached_tokens) for output in outputs],
                [(r.request_id, list(pool.block_table(r.slot or 0))) for r in self.engine.scheduler.active],
                counts,
            )
        )


def serve(engine: Engine, coming: Coming) -> list[Any]:
    """Run steps until no request is left, without regard to the clock. Returns the records of the steps."""
    seen = Seen(engine)
    left = list(coming)
    for step in range(2000):
        while left and left[0][0] <= step:
            _, prompt, new_tokens = left.pop(0)
            assert engine.add_request(Request(f"r{len(left)}", prompt, params(new_tokens)))
        if not left and not engine.has_work:
            return seen.steps
        engine.step()
    raise AssertionError("the engine makes no progress")


def both(phase: int, **options: Any) -> tuple[Engine, Engine]:
    options = {"max_seq_len": 64, "max_batch_size": 4} | options
    if phase == 4:
        options["batch_wait_timeout_s"] = 0.0
    if phase >= 10:
        options["draft_length"] = 0  # guesses need real text, which the simulator does not have
    real = build(NAMES[phase], clock=Clock(), **options)
    return real, simulate_engine(phase, ONE_SECOND_A_PASS, **options)


TIGHT = {"block_size": 4, "num_blocks": 24}  # not enough for two of the longest requests, so one is preempted

SETTINGS: list[tuple[int, dict[str, Any]]] = [
    *((phase, {}) for phase in NAMES),
    *((phase, TIGHT) for phase in NAMES if phase >= 6),
    (5, {"max_prefill_pass_tokens": 16}),
    (6, {"kv_cache_backend": "contiguous"}),
    (7, TIGHT | {"prefill_chunk_size": 5, "prefill_token_budget": 9}),
    (7, {"use_chunked_prefill": False}),
    (7, {"mixed_batches": False, "prefill_chunk_size": 7}),
    (8, TIGHT | {"prefill_chunk_size": 5, "prefill_token_budget": 9}),
    (8, {"enable_prefix_caching": False}),
    (9, TIGHT | {"prefill_chunk_size": 5, "prefill_token_budget": 9}),
    (9, TIGHT | {"pipeline_depth": 1}),
    (9, TIGHT | {"pipeline_depth": 0}),
    (9, TIGHT | {"prefill_mode": "drained"}),
]


@pytest.mark.parametrize(
    ("phase", "options"),
    SETTINGS,
    ids=lambda value: str(value) if isinstance(value, int) else ",".join(value),
)
def test_the_same_requests_make_the_same_plans(phase: int, options: dict[str, Any]) -> None:
    real, simulated = both(phase, **options)
    coming = crowd(seed=phase)
    assert serve(simulated, coming) == serve(real, coming)
    assert_all_free(simulated)
    counters, expected = simulated.telemetry.counters, real.telemetry.counters
    assert counters.preemptions == expected.preemptions
    assert counters.evictions == expected.evictions
    assert counters.requests_finished == len(coming)
