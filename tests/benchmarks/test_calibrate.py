"""Calibration: on every machine, the offered load is the same share of the server's capacity."""

from __future__ import annotations

import pytest

from benchmarks.calibrate import LOADS, CalibrationError, calibrate, fixed_factor, reference_capacity
from benchmarks.client import Endpoint
from benchmarks.loadgen import LoadPlan, LoadResult
from benchmarks.results import Calibration, Generator
from benchmarks.workloads import WORKLOADS, PromptWriter, build
from tests.benchmarks.conftest import record

ENDPOINT = Endpoint("http://127.0.0.1:1", "m")
RATED = [name for name, workload in WORKLOADS.items() if workload.rate is not None]


class Machine:
    """Stands for a server: each plan takes the next of the given times."""

    def __init__(self, *seconds: float, error: str | None = None) -> None:
        self.seconds = list(seconds)
        self.error = error
        self.plans: list[LoadPlan] = []

    def __call__(self, plan: LoadPlan) -> LoadResult:
        self.plans.append(plan)
        took = self.seconds.pop(0)
        records = [
            record(request.index, 0.001 * request.index, [took], error=self.error)
            for request in plan.requests
        ]
        return LoadResult(origin_s=0.0, requests=records, generator=Generator())


def measure(machine: Machine, writer: PromptWriter, name: str, batch: int = 8) -> Calibration:
    return calibrate(WORKLOADS[name], ENDPOINT, writer, batch=batch, measured_on="x", run=machine)


@pytest.mark.parametrize("name", RATED)
@pytest.mark.parametrize("seconds", [0.2, 4.0, 60.0])
def test_offered_load_is_the_same_on_every_machine(name: str, seconds: float, writer: PromptWriter) -> None:
    found = measure(Machine(seconds, seconds), writer, name)
    plan = build(WORKLOADS[name], writer, factor=found.factor)
    sent_per_second = (len(plan) - 1) / plan[-1].send_at_s
    capacity = 8 / seconds
    assert sent_per_second / capacity == pytest.approx(LOADS[name], rel=0.10)


def test_the_factor_by_hand(writer: PromptWriter) -> None:
    found = measure(Machine(5.0, 4.0), writer, "continuous_batching")
    assert found.capacity == pytest.approx(2.0)  # eight requests in 4 s, the faster round
    assert found.reference == pytest.approx(4.0 / 1.1)
    assert found.factor == pytest.approx(2.0 / (4.0 / 1.1))
    assert (found.mode, found.batch, found.measured_on) == ("auto", 8, "x")
    assert found.rounds_s == pytest.approx([5.0, 4.0])


def test_it_measures_a_full_batch_of_equal_average_requests(writer: PromptWriter) -> None:
    machine = Machine(1.0, 1.0)
    measure(machine, writer, "chunked_prefill", batch=5)
    first, second = machine.plans
    for plan in (first, second):
        assert len(plan.requests) == 5
        assert {request.prompt_tokens for request in plan.requests} == {1176}  # 3/4 of 1536 and 1/4 of 96
        assert {request.max_tokens for request in plan.requests} == {160}
        assert {request.send_at_s for request in plan.requests} == {0.0}
        assert len(plan.warmup) == 2
    prompts = [tuple(request.prompt) for plan in (first, second) for request in plan.requests]
    assert len(set(prompts)) == 10  # so a prefix cache has no hits


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in RATED])
def test_without_a_rate_nothing_is_measured(name: str, writer: PromptWriter) -> None:
    assert measure(Machine(), writer, name).factor == 1.0
    assert reference_capacity(WORKLOADS[name]) is None


def test_a_failed_request_is_no_measurement(writer: PromptWriter) -> None:
    with pytest.raises(CalibrationError, match="8 of 8 requests failed: no"):
        measure(Machine(1.0, 1.0, error="no"), writer, "continuous_batching")


def test_fixed_factors() -> None:
    rated, burst = WORKLOADS["continuous_batching"], WORKLOADS["mixed"]
    assert fixed_factor(rated, "table") == Calibration(mode="table", factor=1.0)
    assert fixed_factor(rated, "0.25") == Calibration(mode="given", factor=0.25)
    assert fixed_factor(burst, "0.25").factor == 1.0
    for bad in ("0", "-1", "fast", "inf", "nan"):
        with pytest.raises(ValueError, match=r"rate|float"):
            fixed_factor(rated, bad)
