"""Clients and engines in virtual time: arrivals, waiting, times, and that every request ends."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.metrics import summarize, summarize_server
from benchmarks.workloads import WORKLOADS, planned_requests
from common.engine.engine import Engine
from common.engine.telemetry import StepRecord
from common.startup.phases import phase_names, phase_number
from simulator import Arrival, LinearCost, Timelines, Unlike, arrivals_of, run, simulate_engine
from simulator.observers import Summary
from tests.support.engines import assert_all_free

PHASES = [phase_number(name) for name in phase_names()]
COST = LinearCost(
    pass_base_s=0.01,
    column_s=1e-6,
    token_s=1e-4,
    pair_s=1e-8,
    logit_s=2e-4,
    host_step_s=1e-3,
    between_s=1e-4,
    arrival_s=2e-3,
    delivery_s=1e-3,
)


def engine(phase: int, cost: LinearCost = COST, **options: Any) -> Engine:
    options = {"max_seq_len": 256, "max_batch_size": 4} | options
    return simulate_engine(phase, cost, **options)


def tight(phase: int) -> Engine:
    """Build an engine. If it has blocks, they are so few that sequences are preempted."""
    blocks = {"block_size": 4, "num_blocks": 60} if phase >= 6 else {}
    return engine(phase, max_waiting_requests=3, **blocks)


def crowd(count: int, seed: int = 0) -> list[Arrival]:
    rng = random.Random(seed)
    times = sorted(rng.uniform(0, count * 0.05) for _ in range(count))
    shared = list(range(1, 41))
    write = Unlike()
    prompts = [(shared if i % 2 else []) + write(rng, rng.randint(1, 90)) for i in range(count)]
    return [Arrival(i, times[i], prompts[i], rng.randint(1, 60)) for i in range(count)]


@pytest.mark.parametrize("phase", PHASES)
def test_every_request_ends_once_and_all_memory_comes_back(phase: int) -> None:
    simulated, seen = tight(phase), Timelines()
    arrivals = crowd(60)
    run(simulated, arrivals, seen)
    assert sorted(record.index for record in seen.requests) == list(range(60))
    for record in seen.requests:
        wanted = arrivals[record.index].new_tokens
        assert len(record.token_times_s) == record.completion_tokens == wanted
        assert record.token_times_s == sorted(record.token_times_s)
        assert record.sent_s is not None
        assert record.sent_s < record.token_times_s[0]
        assert record.finished_s == record.token_times_s[-1]
    counters = simulated.telemetry.counters
    assert (counters.requests_added, counters.requests_finished) == (60, 60)
    assert counters.preemptions > 0 or phase < 6
    assert_all_free(simulated)
    starts = [step.started_s for step in simulated.telemetry.records]
    assert starts == sorted(starts)


def test_times_of_one_request_follow_the_prices() -> None:
    """The times of one request alone are computed by hand."""
    simulated, seen = engine(7, prefill_chunk_size=8), Timelines()
    run(simulated, [Arrival(0, 1.0, range(12), 2)], seen)
    chunks = [  # the seconds of a pass, and of reading its token
        0.01 + 8 * 1e-4 + 36e-8 + 1e-3,
        0.01 + 4 * 1e-4 + (9 + 10 + 11 + 12) * 1e-8 + 2e-4 + 1e-3,
        0.01 + 13 * 1e-6 + 2e-4 + 1e-3,
        0.0,  # the step that releases the request
    ]
    assert [step.duration_s for step in simulated.telemetry.records] == pytest.approx(chunks)
    begin = 1.0 + 2e-3
    first = begin + chunks[0] + 1e-4 + chunks[1] + 1e-3
    assert seen.requests[0].token_times_s == pytest.approx([first, first + 1e-4 + chunks[2]])


def test_a_pipelined_engine_hides_the_host() -> None:
    """With two steps in flight a step takes the longer of pass and host, not both."""

    def gap(phase: int, host_s: float, **options: Any) -> float:
        seen = Timelines()
        cost = LinearCost(pass_base_s=0.01, host_step_s=host_s)
        run(engine(phase, cost, **options), [Arrival(0, 0.0, range(8), 40)], seen)
        return seen.requests[0].gaps_s[20]

    assert gap(8, 0.004) == pytest.approx(0.014)
    assert gap(9, 0.004, pipeline_depth=0) == pytest.approx(0.014)
    assert gap(9, 0.004) == pytest.approx(0.01)
    assert gap(9, 0.03) == pytest.approx(0.03)


def test_clients_that_wait_for_an_answer() -> None:
    seen = Timelines()
    arrivals = [
        Arrival(0, 0.0, range(8), 5),
        Arrival(1, 0.5, range(100, 106), 3, after=0, continues=True),
        Arrival(2, 0.0, range(200, 204), 3, after=1),
    ]
    run(engine(8), arrivals, seen)
    first, second, third = seen.requests
    assert (first.prompt_tokens, second.prompt_tokens, third.prompt_tokens) == (8, 8 + 5 + 6, 4)
    assert first.finished_s is not None
    assert second.sent_s == pytest.approx(first.finished_s + 0.5)
    assert third.sent_s == second.finished_s


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        ([Arrival(0, 0.0, range(250), 7)], "250 tokens and asks for 7; 256"),
        ([Arrival(0, 0.0, range(5), 7), Arrival(1, 0.0, range(5), 7, after=5)], "comes after 5"),
    ],
)
def test_arrivals_that_cannot_be_served_are_named(arrivals: Sequence[Arrival], message: str) -> None:
    simulated = engine(7)
    with pytest.raises(ValueError, match=message):
        run(simulated, arrivals, Timelines())
    run(simulated, [Arrival(9, 0.0, range(5), 7)], seen := Timelines())
    assert seen.requests[-1].completion_tokens == 7


@pytest.mark.parametrize("name", ["mixed", "multi_turn", "baseline"])
def test_a_summary_has_the_numbers_of_the_timelines(name: str) -> None:
    workload = WORKLOADS[name]
    engines = [simulate_engine(8, COST, max_batch_size=6, model="dummy:llama-60m") for _ in range(2)]
    steps: list[StepRecord] = []
    engines[0].watchers.append(lambda record, *_: steps.append(record))
    timelines, summary = Timelines(), Summary(engines[1:])
    for simulated, seen in zip(engines, (timelines, summary), strict=True):
        plan = planned_requests(workload, Unlike())
        run(simulated, arrivals_of(plan, sequential=name == "baseline"), seen)
    exact = summarize(timelines.requests, slo_ttft_s=2.0, slo_itl_s=0.2).model_dump()
    found = summary.metrics().model_dump()
    for metric, value in exact.items():
        if isinstance(value, dict):
            assert found[metric] == pytest.approx(value, rel=2e-3)
        else:
            assert found[metric] == pytest.approx(value), metric
    counters = dataclasses.asdict(engines[0].telemetry.counters)
    expected = summarize_server({}, counters, [dataclasses.asdict(step) for step in steps])
    assert summary.server_metrics().model_dump() == pytest.approx(expected.model_dump())


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_guesses_that_come_true_save_passes(acceptance: float) -> None:
    cost = LinearCost(pass_base_s=1.0, token_s=0.001, row_s=0.001)
    engine = simulate_engine(10, cost, max_batch_size=1, acceptance=acceptance)
    plain = simulate_engine(9, cost, max_batch_size=1)
    arrivals = [Arrival(0, 0.0, (5,) * 20, 200)]
    seconds, usual = run(engine, arrivals, Timelines()), run(plain, arrivals, Timelines())
    counters = engine.telemetry.counters
    if acceptance == 0.0:
        assert (seconds, counters.draft_tokens) == (usual, 0)
    else:
        assert seconds < (0.75 if acceptance < 1 else 0.25) * usual
        assert counters.accepted_tokens >= (0.1 if acceptance < 1 else 0.95) * counters.draft_tokens


@pytest.mark.parametrize("gigabytes", [4, 0.001])
def test_a_tier_is_read_at_its_rate_if_that_pays(gigabytes: float) -> None:
    """A prompt comes again after others have pushed it out of memory. Times are computed by hand."""
    options = {"num_blocks": 33, "block_size": 16, "prefill_chunk_size": 512, "max_seq_len": 600}
    cost, text = LinearCost(token_s=1e-3), range(513)
    arrivals = [
        Arrival(0, 0.0, text, 2),
        Arrival(1, 10.0, range(1000, 1513), 2),
        Arrival(2, 20.0, text, 2),
    ]
    found = {}
    for name, more in (("without", {}), ("with", {"kv_tier": "nowhere"})):
        simulated = simulate_engine(
            11, cost, model="dummy:llama-60m", disk_bytes_s=gigabytes * 1e9, **options, **more
        )
        run(simulated, arrivals, seen := Timelines())
        found[name] = [record.ttft_s for record in seen.requests]
        assert_all_free(simulated)
    shape = simulated.runner.model.config.kv_shape(torch.float32)
    reading_s = 512 * shape.bytes_per_token / (gigabytes * 1e9)
    counters = simulated.telemetry.counters
    assert found["with"][:2] == pytest.approx(found["without"][:2])
    if gigabytes == 4:
        assert counters.tier_hits == 32
        assert reading_s < found["with"][2] < reading_s + 0.005
        assert counters.tier_saved_s == pytest.approx(0.512 - reading_s)
    else:
        assert (counters.tier_hits, counters.tier_declined) == (0, 32)
        assert found["with"][2] == pytest.approx(found["without"][2])
