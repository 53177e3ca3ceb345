"""Fitting finds known prices, and the simulator plans the steps of a published run as they were measured."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from benchmarks.files import Together, load_comparisons
from benchmarks.results import RESULTS, Run
from simulator import LinearCost, Work
from simulator.cost import Device, RooflineCost
from simulator.fitting import cost_of, fit_group, fit_prices, held_out
from simulator.predict import figures, simulate_run
from simulator.prices import PRICES, SYNCHRONOUS, Fit, Group, costs_table, find_cost, load_fits
from simulator.replay import replay

LINEUP = "20261125-140318"  # the published comparison of all phases


@functools.cache
def published() -> list[Together]:
    return load_comparisons(RESULTS)


def committed(workload: str, phase: int) -> Run:
    """Return the run of a phase in the published line-up that was published with its timeline."""
    return next(
        run.model_copy(deep=True)
        for each in published()
        if each.key[:2] == (LINEUP, workload)
        for run in each.runs
        if run.server.label == f"phase {phase}" and run.requests
    )


def test_known_prices_are_found() -> None:
    rng = np.random.default_rng(0)
    amounts = rng.integers(0, 300, (4000, 5)).astype(float)
    amounts[:, 0] = 1
    prices = np.array([8e-3, 0.0, 1e-6, 4e-4, 2e-5])
    seconds = amounts @ prices * rng.normal(1, 0.05, len(amounts))
    found = fit_prices(amounts, seconds)
    assert found == pytest.approx(prices, rel=0.05, abs=2e-6)
    assert (found >= 0).all()
    assert (amounts @ found).sum() == pytest.approx(seconds.sum())  # even if single steps do not fit


@pytest.mark.parametrize(
    ("workload", "phase"), [("mixed", 4), ("mixed", 5), ("mixed", 6), ("multi_turn", 8), ("mixed", 9)]
)
def test_a_measured_run_is_planned_alike_in_every_step(workload: str, phase: int) -> None:
    run = committed(workload, phase)
    found = replay(run)
    assert run.server_metrics is not None
    assert len(found.steps) == run.server_metrics.steps
    assert all(step.is_same for step in found.steps)
    assert sum(step.tokens for step in found.steps) == sum(
        record.completion_tokens for record in run.requests
    )
    assert all(work.held <= work.columns for step in found.steps for work in step.works)


def test_prices_of_a_run_predict_it() -> None:
    run = committed("mixed", 8)
    replays = [replay(run)]
    tokens_per_s, ttft_s = figures(run.metrics)
    predicted = figures(simulate_run(run, cost_of(replays)))
    assert predicted == pytest.approx((tokens_per_s, ttft_s), rel=0.15)
    fit = fit_group(Group.of(run), replays, held_out(replays))
    assert (fit.step_error, fit.total_error) == (None, None)  # there is no other workload to test on


def test_fits_survive_their_file(tmp_path: Path) -> None:
    cost = LinearCost(pass_base_s=1e-3, held_s=2e-7, between_row_s=3e-5)
    fits = [
        Fit(Group("machine", "dummy:x", revision, "native", SYNCHRONOUS), cost, newest, 3, 99, 1.0, 0.1, None)
        for revision, newest in (("abc", "2026-01-01"), ("def", "2026-02-01"))
    ]
    assert load_fits(tmp_path) == []
    costs_table(fits).save(tmp_path)
    read = load_fits(tmp_path)
    assert [fit.group.revision for fit in read] == ["def", "abc"]  # newest first
    for name in PRICES:
        assert getattr(read[0].cost, name) == pytest.approx(getattr(cost, name))
    assert find_cost(read, "dummy:x", SYNCHRONOUS, "mach").group.revision == "def"
    with pytest.raises(ValueError, match="nothing was measured of dummy:y"):
        find_cost(read, "dummy:y", SYNCHRONOUS, "")


def test_a_roofline_is_bound_by_memory_and_then_by_arithmetic() -> None:
    from common.models.registry import open_checkpoint

    shape = open_checkpoint("dummy:llama-3.2-1b").config
    cost = RooflineCost(shape, Device(1e12, 1e14, 1.0, launch_s=0.0))
    weights_s = 1_235_814_400 * 2 / 1e12
    alone, eight = (cost.pass_s(Work(rows, 0, 0, 0, 0, rows)) for rows in (1, 8))
    assert alone == eight == pytest.approx(weights_s, rel=1e-3)  # eight rows cost as much as one
    assert cost.pass_s(Work(0, 0, 0, 4096, 0, 1)) > 10 * weights_s  # a prompt is bound by arithmetic
    int8 = RooflineCost(shape, Device(1e12, 1e14, 1.0, launch_s=0.0), quantized="int8")
    assert int8.pass_s(Work(1, 0, 0, 0, 0, 1)) == pytest.approx(weights_s / 2, rel=1e-2)
    assert int8.pass_s(Work(0, 0, 0, 4096, 0, 1)) == cost.pass_s(
        Work(0, 0, 0, 4096, 0, 1)
    )  # the same arithmetic, because weights are widened
    more = cost.pass_s(Work(8, 80_000, 80_000, 0, 0, 8))
    shared = cost.pass_s(Work(8, 80_000, 10_000, 0, 0, 8))
    assert weights_s < shared < more
