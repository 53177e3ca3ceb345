"""The command line, routers before several engines, and the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.files import load_comparisons
from benchmarks.results import RESULTS
from benchmarks.tables import load_tables
from simulator import Arrival, LinearCost, Timelines, run, simulate_engine
from simulator.__main__ import main, parser, simulate
from simulator.calibrate import main as calibrate
from simulator.plan import main as plan
from simulator.predict import PREDICTIONS
from simulator.prices import COSTS, load_fits
from simulator.routing import POLICIES, Routed

GPU = ["--gpu", "3350,990", "--model", "dummy:llama-3.2-1b"]


def test_options_and_variants_change_the_simulated_engine() -> None:
    options = parser().parse_args(
        [
            *(*GPU, "--requests", "8", "--phases", "7"),
            *("--option", "7:max-batch-size=2", "--variant", "7:prefill-chunk-size=64"),
        ]
    )
    first, second = simulate(options, Console(quiet=True))
    assert first.server_metrics is not None
    assert second.server_metrics is not None
    assert 1 < first.server_metrics.mean_batch <= 2
    assert second.server_metrics.steps > first.server_metrics.steps
    assert second.server.label == "phase 7, prefill-chunk-size=64"


def test_the_rate_is_scaled_to_what_is_simulated() -> None:
    """As in `benchmarks compare`, a machine of half the speed gets about half the rate."""

    def rate(gpu: str, *more: str) -> float:
        given = ["--gpu", gpu, "--phases", "5", "--workload", "continuous_batching", "--requests", "8", *more]
        (found,) = simulate(parser().parse_args(given), Console(quiet=True))
        assert found.workload.rate is not None
        return found.workload.rate

    assert rate("100,10") > 1.5 * rate("50,5")
    assert rate("100,10", "--rate", "table") == 4.0
    assert rate("100,10", "--rate", "2") == 8.0
    assert rate("100,10", "--poisson", "3.5") == 3.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "64"], "no 64; there are"),
        (["--phases", "3"], "phase"),
        (["--replicas", "0"], "one at least"),
        (["--gpu", "fast"], "expected GB/S"),
        (["--gpu", "3350,0"], "expected GB/S"),
        (["--gpu", "9,9,0.5,1"], "expected GB/S"),
        (["--rate", "0", "--workload", "chunked_prefill", *GPU], "a factor is a positive number"),
        (["--model", "dummy:llama-135m"], "nothing was measured of dummy:llama-135m"),
        (["--machine", "abacus"], "on abacus"),
        (["--option", "7:max-batch-size=0", "--phases", "7"], "max_batch_size"),
        (["--option", "7:quantize=int8", "--phases", "7"], "no prices of it were measured"),
        (["--workload", "4000+400", *GPU], "4096"),
        (["--workload", "multi_turn", "--poisson", "3"], "conversations"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


# ---------------------------------------------------------------------- several engines


def crowd(count: int) -> list[Arrival]:
    """Return requests that begin with one of four texts, in turn."""
    return [
        Arrival(i, 0.1 * i, [*range(100 * (i % 4), 100 * (i % 4) + 64), 1000 + i], 8) for i in range(count)
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_behind_a_router(policy: str) -> None:
    cost = LinearCost(pass_base_s=0.02, token_s=1e-4)
    engines = [simulate_engine(8, cost, max_batch_size=2, max_waiting_requests=2) for _ in range(3)]
    seen = Timelines()
    run(engines, crowd(60), seen, route=Routed(POLICIES[policy](seed=0)))
    assert sorted(record.index for record in seen.requests) == list(range(60))
    assert all(record.completion_tokens == 8 for record in seen.requests)
    counts = [engine.telemetry.counters.requests_finished for engine in engines]
    assert sum(counts) == 60
    assert all(counts)
    assert all(engine.runner.pool.reserved_tokens == 0 for engine in engines)


def test_the_plan_makes_its_table(tmp_path: Path) -> None:
    assert plan(["--replicas", "1", "3", "--requests", "6", "--out", str(tmp_path)]) == 0
    (table,) = load_tables(tmp_path)
    assert [(row[0], row[1]) for row in table.rows] == [(1, "random"), *((3, policy) for policy in POLICIES)]
    assert all(row[2] == 6 * int(row[0] or 0) for row in table.rows)


# ---------------------------------------------------------------------- prices from files


def test_calibrating_writes_both_tables(tmp_path: Path) -> None:
    for each in load_comparisons(RESULTS):
        if each.key[:2] in {("20261125-140318", "mixed"), ("20261125-140318", "single")}:
            next(one for one in each.runs if one.server.label == "phase 6" and one.requests).save(tmp_path)
    assert calibrate(["--results", str(tmp_path)]) == 0
    (fit,) = load_fits(tmp_path)
    assert (fit.runs, fit.same_share) == (2, 1.0)
    assert fit.total_error is not None
    assert {table.name for table in load_tables(tmp_path)} == {COSTS, PREDICTIONS}
    (predicted,) = [table for table in load_tables(tmp_path) if table.name == PREDICTIONS]
    assert len(predicted.rows) == 2
