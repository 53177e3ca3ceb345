"""Measurements on pages: tables, figures and criteria, made from results. What is not there stops the build."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.results import Metrics, Percentiles, Run
from benchmarks.tables import MeasuredTable
from docs.building import charts, tables
from docs.building.tables import NotMeasuredError

COMPARED = "continuous_batching", "phase 4", "phase 5"
PHASES = (("phase 4", 4), ("phase 5", 5))
THROUGHPUT = (*COMPARED, "output tokens / s")  # 400 of phase 4, 500 of phase 5


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder of results, which the tables are made from."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tables, "PLOTS", tmp_path / "plots")
    tables._complete_comparisons.cache_clear()
    return tmp_path / "results"


def a_run(label: str = "phase 5", order: float = 5, *, ttft: float = 1.0, **changed: object) -> Run:
    """Return a complete run with this TTFT. Later phases have more throughput and longer gaps."""
    spread = Percentiles(p50=ttft / 2, p95=ttft, p99=ttft, max=ttft, mean=ttft / 2)
    metrics = Metrics(
        requests=2,
        completed=2,
        errors=0,
        short=0,
        duration_s=4.0,
        output_tokens=400,
        prompt_tokens=100,
        output_tokens_per_s=100.0 * order,
        requests_per_s=0.5,
        arrival_rate=1.0,
        ttft_s=spread,
        itl_s=Percentiles(p50=0.1, p95=0.1, p99=order / 10, max=0.9, mean=0.1),
        latency_s=spread,
        longest_stall_s=0.9,
        slo_attainment=0.5,
        slo_ttft_s=2.0,
        slo_itl_s=0.2,
    )
    environment = {"cpu": "A Processor", "cores": 2, "git": "0123456789ab", "packages": {"torch": "2.13"}}
    fields: dict[str, object] = {
        "comparison": "20260102-030405",
        "started_at": "2026-01-02T03:04:05+00:00",
        "status": "ok",
        "workload": {"name": "continuous_batching", "arrivals": "uniform", "rate": 2.0},
        "server": {"label": label, "order": order, "model": "dummy:llama-60m", "options": {"seed": "0"}},
        "calibration": {"mode": "auto", "factor": 0.5},
        "environment": environment,
        "metrics": metrics.model_dump(),
    }
    return Run.model_validate(fields | changed)


def save(folder: Path, *, repeats: Sequence[int] = (1, 2, 3), ttft: float = 1.0, **changed: object) -> None:
    """Save a comparison of phases 4 and 5 and a figure of it. Phase 4 has twice the TTFT."""
    for repeat in repeats:
        for label, order in PHASES:
            a_run(label, order, repeat=repeat, ttft=ttft * (6 - order), **changed).save(folder)
    draw(str(changed.get("comparison", "20260102-030405")), "bars")


def draw(comparison: str, *kinds: str) -> None:
    """Add figures of a comparison to the list of drawn figures."""
    captions = tables.PLOTS / "captions.json"
    captions.parent.mkdir(exist_ok=True)
    drawn = json.loads(captions.read_text()) if captions.is_file() else {}
    for kind in kinds:
        drawn[f"{comparison}-{kind}"] = {
            "title": comparison,
            "caption": kind,
            "figure": kind,
            "workload": "continuous_batching",
            "model": "dummy:llama-60m",
            "quick": False,
            "comparison": comparison,
            "size": [640, 480],
            "files": {theme: f"{comparison}-{kind}-{theme}.svg" for theme in ("light", "dark")},
        }
    captions.write_text(json.dumps(drawn))


def section(*compared: str, first: str = "bars") -> str:
    tables._complete_comparisons.cache_clear()
    return tables.measured_section(*(compared or COMPARED), first=first)


def rest() -> str:
    tables._complete_comparisons.cache_clear()
    return tables.measured_rest(*COMPARED, first="bars")


def verdicts(shown: str) -> dict[str, str]:
    """Return the verdict on each metric in a table of two servers."""
    rows = [line.strip("| ").split(" | ") for line in shown.splitlines() if line.startswith("| ")]
    return {row[0]: row[4].rstrip(" |") if len(row) > 4 else "" for row in rows[2:]}


# ---------------------------------------------------------------------- what is not there


def test_a_measurement_that_is_not_there_stops_the_build(folder: Path) -> None:
    asked = [
        section,
        lambda: tables.sweep_table("continuous_batching", "seats"),
        lambda: tables.criterion((*THROUGHPUT, "≥ 1")),
        lambda: tables.measured_table("batch_size"),
        lambda: charts.line_chart("batch_size", "rows", "ms", title="", y_title=""),
    ]
    for each in asked:
        with pytest.raises(NotMeasuredError):
            each()


def test_a_figure_that_was_not_drawn_stops_the_build(folder: Path) -> None:
    save(folder)
    assert "20260102-030405-bars-light.svg" in section()
    with pytest.raises(NotMeasuredError, match="no figure cdf of comparison 20260102-030405"):
        section(first="cdf")
    save(folder, comparison="20260103-000000")
    (tables.PLOTS / "captions.json").unlink()
    draw("20260102-030405", "bars")
    with pytest.raises(NotMeasuredError, match="no figure bars of comparison 20260103-000000"):
        section()


# ---------------------------------------------------------------------- comparisons


def test_results_become_tables_with_ratios(folder: Path) -> None:
    save(folder)
    a_run("phase 6", 6, status="failed", reason="the server fell over", metrics=None).save(folder)
    shown = section()
    assert "**dummy:llama-60m** on A Processor, 2 cores" in shown
    assert "median of 3 runs" in shown
    assert "| TTFT p99 | 2.00 s | 1.00 s | ×0.50 | better |" in shown
    assert "| TTFT p99 | 2.00 s | **1.00 s**  ×0.50 | – |" in rest()
    assert "phase 6 has no complete run: the server fell over." in rest()


def test_a_verdict_needs_repeats_that_agree(folder: Path) -> None:
    save(folder, repeats=())
    for repeat, (ttft, attained) in enumerate(((1.0, 0.5), (1.2, 0.55), (0.8, 0.6)), start=1):
        old = a_run("phase 4", 4, repeat=repeat, ttft=2 * ttft)
        new = a_run("phase 5", 5, repeat=repeat, ttft=ttft)
        assert old.metrics is not None
        assert new.metrics is not None
        old.metrics.slo_attainment, new.metrics.slo_attainment = attained, attained - 0.01 * repeat  # overlap
        new.metrics.longest_stall_s = 1.4
        for run in (old, new):
            run.save(folder)
    shown = section()
    assert "| output tokens / s | 400 | 500 | ×1.25 | better |" in shown
    assert "| longest stall | 900 ms | 1.40 s | ×1.56 | **worse** |" in shown
    found = verdicts(shown)
    assert [found[title] for title in ("TTFT p50", "TTFT p99")] == ["better", "better"]
    assert found["ITL p99"] == "**worse**"
    assert [found[title] for title in ("ITL p50", "SLO attainment")] == ["alike", "alike"]


def test_a_criterion_is_met_if_every_model_keeps_every_bound(folder: Path) -> None:
    save(folder)
    assert tables.criterion((*THROUGHPUT, "≥ 1.25")) == (
        "met | `continuous_batching`: output tokens / s ×1.25 (`dummy:llama-60m`) (asked: ≥ 1.25)"
    )
    assert tables.criterion((*THROUGHPUT, "≥ 1.26")).startswith("**missed** | ")
    two = tables.criterion((*THROUGHPUT, "≥ 1.25"), (*COMPARED, "TTFT p99", "≤ 0.4"))
    assert two.startswith("**missed** | ")
    assert two.count("<br>") == 1


def test_sweeps_have_tables_of_their_own(folder: Path) -> None:
    save(folder)
    for seats, ttft, comparison in ((1, 3.0, "20990101"), (2, 2.0, "20990101"), (9, 1.0, "20990202")):
        run = a_run(f"phase 5, seats={seats}", 5 + seats / 1000, ttft=ttft, comparison=f"{comparison}-000000")
        run.server.variant = {"seats": str(seats)}
        run.save(folder / "local" if seats == 9 else folder)
    published, own = tables.sweep_table("continuous_batching", "seats").split("\n\n**")
    lines = published.splitlines()
    column = next(line for line in lines if "TTFT p99" in line).split(" | ").index("TTFT p99")
    assert [line.split(" | ")[column] for line in lines if "seats=" in line] == ["3.00 s", "**2.00 s**"]
    assert "seats=9" in own
    assert "measured in this checkout" in own
    assert "seats" not in section(), "a sweep is newer here, but is no comparison of phases"


def test_a_section_has_a_tab_for_each_model_with_one_figure_and_one_table(folder: Path) -> None:
    save(folder)
    draw("20260102-030405", "cdf")
    for repeat in (1, 2, 3):
        for label, order in PHASES:
            a_run(label, order, repeat=repeat, comparison="20260103-000000").save(folder / "other")
    draw("20260103-000000", "bars")
    shown = section(first="cdf")
    left = tables.measured_rest(*COMPARED, first="cdf")
    assert re.findall(r'^=== "(.+)"', shown, re.MULTILINE) == ["llama-60m", "llama-60m (other)"]
    first, other = shown.split("=== ")[1:]
    assert first.index("20260102-030405-cdf-light") < first.index("| TTFT p99 |")
    assert "20260103-000000-bars-light" in other, "there are no times of tokens, so no cdf was drawn"
    assert "20260102-030405-bars-light" in left
    assert "20260103" not in left


# ---------------------------------------------------------------------- measured tables


def a_table(rows: Sequence[Sequence[int | float | str | None]], **changed: object) -> MeasuredTable:
    fields: dict[str, object] = {
        "name": "decode_step",
        "title": "one step",
        "setup": {"batch": "8"},
        "started_at": "2026-01-02T03:04:05+00:00",
        "environment": {"cpu": "A Processor", "cores": 2, "git": "0123456789ab"},
        "columns": ["blocks", "ms", "note"],
        "rows": rows,
    }
    return MeasuredTable.model_validate(fields | changed)


def test_a_page_shows_setup_and_rows_of_each_machine(folder: Path) -> None:
    rows = [[16, 12.345, "same"], [8, None, ""]]
    a_table(rows).save(folder)
    a_table(rows, started_at="2026-02-02T00:00:00+00:00").save(folder / "local")
    own, published = tables.measured_table("decode_step").split("A Processor, 2 cores")[1:]
    assert own.startswith(", measured in this checkout")
    assert "measured in this checkout" not in published
    for shown in ("batch 8", "revision `0123456789ab`", "| 16 | 12.3 | same |", "| 8 | – |  |"):
        assert shown in published


def test_a_chart_has_a_curve_for_each_value_of_a_column(folder: Path) -> None:
    rows = [[1, 9.0, "random"], [4, None, "random"], [1, 5.0, "least_loaded"], [4, 7.0, "least_loaded"]]
    a_table(rows).save(folder)
    drawn = charts.line_chart("decode_step", "blocks", "ms", by="note", title="", y_title="")
    assert re.findall(r">(random|least loaded)<", drawn) == ["random", "least loaded"]
    assert [path.count("L") for path in re.findall(r'class="line \w+" d="(.+?)"', drawn)] == [0, 1]


def test_a_ratio_has_a_bar_to_the_side_where_it_wins_or_loses(folder: Path) -> None:
    a_table([["wins", 0.1, ""], ["alike", 1.0, ""], ["loses", 2.0, ""]]).save(folder)
    drawn = charts.ratio_chart("decode_step", "ms", title="")
    assert re.findall(r">(wins|alike|loses)<", drawn) == ["wins", "alike", "loses"]
    bars = [
        (float(x), float(width)) for x, width in re.findall(r'<rect .*? x="(.+?)" .*? width="(.+?)"', drawn)
    ]
    (left, wide), (one, none), (right, narrow) = bars
    assert left + wide == pytest.approx(one, abs=0.2)
    assert (none, right) == (0, one)
    assert wide / narrow == pytest.approx(math.log(10) / math.log(2), rel=0.01)
