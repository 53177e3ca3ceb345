"""Lines of arithmetic: they predict the published results, and a wrong one stops the build."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.results import RESULTS, ServerMetrics
from benchmarks.tables import MeasuredTable
from docs.building import results
from docs.building.arithmetic import (
    FACTOR,
    MODEL,
    Prices,
    WrongPredictionError,
    arithmetic,
    checked,
    prices_on,
    second_pass,
)
from tests.docs.test_results import PHASES, a_run

PRICES = {"pass_base": 6000.0, "row": 300.0, "column": 1.0, "held": 0.5, "token": 200.0, "pair": 0.1}


def save(folder: Path, batches: dict[int, float]) -> None:
    """Save prices, and three runs of phases 4 and 5 with these mean batches. Their throughput is 400 and 500."""
    for repeat in (1, 2, 3):
        for label, order in PHASES:
            telemetry = ServerMetrics(
                steps=100,
                mean_batch=batches[order],
                prefill_tokens=100,
                decode_tokens=400,
                padded_tokens=0,
                idle_rows=0,
                padded_share=0.0,
                preemptions=0,
                busy_s=4.0,
                kv_used_mean=2000.0,
                kv_used_max=3000,
                kv_reserved_mean=2000.0,
                kv_reserved_max=3000,
            )
            a_run(label, order, repeat=repeat, server_metrics=telemetry.model_dump()).save(folder)
    kind = {"machine": "A Processor", "model": MODEL, "kernels": "native", "steps": "synchronous"}
    fits = [
        {**kind, "runs": runs, **{f"{name}, µs": value * scale for name, value in PRICES.items()}}
        for runs, scale in ((3, 7.0), (160, 1.0), (9, 5.0))
    ]
    MeasuredTable(
        name="simulator_costs",
        title="prices",
        columns=list(fits[0]),
        rows=[list(fit.values()) for fit in fits],
    ).save(folder)
    results.groups.cache_clear()


@pytest.mark.parametrize("phase", range(4, 10))
def test_the_published_results_are_what_the_page_predicts(phase: int) -> None:
    assert "; measured: ×" in arithmetic(phase, RESULTS)


def test_a_line_names_its_quantities_its_prediction_and_the_measurement(tmp_path: Path) -> None:
    save(tmp_path, {4: 4.0, 5: 6.0})
    line = arithmetic(5, tmp_path)
    assert "4.00 sequences a step in phase 4, 6.00 in phase 5" in line
    assert "×1.50; measured: ×1.25" in line


def test_a_prediction_that_the_results_contradict_stops_the_build(tmp_path: Path) -> None:
    save(tmp_path, {4: 2.0, 5: 6.0})
    with pytest.raises(WrongPredictionError) as caught:
        arithmetic(5, tmp_path)
    assert "×3.00" in str(caught.value)
    assert "×1.25" in str(caught.value)


@pytest.mark.parametrize("measured", [2.0 / FACTOR / 1.01, 2.0 * FACTOR * 1.01])
def test_too_little_and_too_much_are_wrong(measured: float) -> None:
    with pytest.raises(WrongPredictionError):
        checked("throughput", 2.0, measured)


def test_without_results_there_is_no_line(tmp_path: Path) -> None:
    results.groups.cache_clear()
    assert arithmetic(5, tmp_path) == arithmetic(9, tmp_path) == second_pass(tmp_path) == ""


def test_a_second_pass_costs_less_than_a_step_with_a_chunk() -> None:
    price, step = (int(found) for found in re.findall(r"(\d+) ms", second_pass(RESULTS)))
    assert 0 < price < step


def test_prices_are_those_of_the_machine_and_of_the_fit_with_most_runs(tmp_path: Path) -> None:
    save(tmp_path, {4: 4.0, 5: 6.0})
    prices = prices_on("A Processor", tmp_path)
    assert prices == Prices(base=6.0, row=0.3, column=0.0015, token=0.2, pair=0.0001)
    assert prices.decode_ms(2, 1000) == pytest.approx(6.0 + 0.6 + 1.5)
    assert prices.prompt_ms(10, before=100) == pytest.approx(2.0 + 0.0001 * 10 * 105)
    assert prices_on("Another Processor", tmp_path) is None
