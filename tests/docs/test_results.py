"""Sections, sentences, tables and charts made from results."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.results import Lineup, Metrics, Percentiles, Run
from benchmarks.tables import MeasuredTable
from docs.building import charts, ledger, peers, results, stories

COMPARED = "continuous_batching", "phase 4", "phase 5"
PHASES = (("phase 4", 4), ("phase 5", 5))


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
    """Save a comparison of phases 4 and 5. Phase 4 has twice the TTFT."""
    for repeat in repeats:
        for label, order in PHASES:
            a_run(label, order, repeat=repeat, ttft=ttft * (6 - order), **changed).save(folder)
    results.groups.cache_clear()


def section(folder: Path, *compared: str) -> str:
    """Return a measured section of a page. It has no pictures, because none were drawn from these results."""
    results.groups.cache_clear()
    return stories.measured_section(*(compared or COMPARED), first="bars", results=folder, folder=folder)


def rest(folder: Path) -> str:
    """Return the folded part of a measured section."""
    results.groups.cache_clear()
    return stories.measured_rest(*COMPARED, first="bars", results=folder, folder=folder)


def verdicts(shown: str) -> dict[str, str]:
    """Return the verdict on each metric in a table of two servers."""
    rows = [line.strip("| ").split(" | ") for line in shown.splitlines() if line.startswith("| ")]
    return {row[0]: row[4].rstrip(" |") if len(row) > 4 else "" for row in rows[2:]}


def test_without_results_pages_say_how_to_make_them(tmp_path: Path) -> None:
    assert "--phases 4,5 --workload continuous_batching" in section(tmp_path)
    assert ".md" in ledger.ledger(tmp_path)
    assert stories.measured_rest(*COMPARED, first="bars", results=tmp_path, folder=tmp_path) == ""
    assert stories.story_picture(*COMPARED, first="cdf", root="", results=tmp_path, folder=tmp_path) == ""
    assert charts.line_chart("batch_size", "rows", "step, ms", title="", y_title="", results=tmp_path) == ""
    assert charts.measured_cell("batch_size", "step, ms", 8, results=tmp_path) == "(not measured yet)"
    assert charts.measured_ratio("batch_size", "step, ms", [1], [8], results=tmp_path) == "(not measured yet)"
    assert "<svg" not in peers.peer_chart(tmp_path)


def test_results_become_tables_with_ratios_and_losses(tmp_path: Path) -> None:
    for repeat, factor in enumerate((1.0, 1.1, 0.9), start=1):
        for (label, order), ttft in zip(PHASES, (2.0, 0.5), strict=True):
            a_run(label, order, repeat=repeat, ttft=ttft * factor).save(tmp_path)
    a_run("phase 6", 6, status="failed", reason="the server fell over", metrics=None).save(tmp_path)
    table = section(tmp_path)
    assert "**dummy:llama-60m** on A Processor, 2 cores" in table
    assert "median of 3 runs" in table
    assert "| TTFT p99 | 2.00 s | 500 ms | ×0.25 | better |" in table
    assert "| TTFT p99 | 2.00 s | **500 ms**  ×0.25 | – |" in rest(tmp_path)
    assert "phase 6 has no complete run: the server fell over." in rest(tmp_path)
    shown = ledger.ledger(tmp_path)
    assert "7 runs in 1 comparisons" in shown
    assert "phase 5 is worse than what it is compared to: ITL p99 ×1.25" in shown
    assert "phase 6, run 1, failed: the server fell over" in shown
    assert "revision `0123456789ab`" in shown


def test_a_readers_own_results_stand_beside_the_published_ones(tmp_path: Path) -> None:
    save(tmp_path)
    save(tmp_path / "local", comparison="20990101-000000")
    published, own = section(tmp_path).split("A Processor, 2 cores")[1:]
    assert "measured in this checkout" not in published
    assert own.startswith(", measured in this checkout")


def test_a_verdict_needs_repeats_that_agree(tmp_path: Path) -> None:
    for repeat, (ttft, attained) in enumerate(((1.0, 0.5), (1.2, 0.55), (0.8, 0.6)), start=1):
        old = a_run("phase 4", 4, repeat=repeat, ttft=2 * ttft)
        new = a_run("phase 5", 5, repeat=repeat, ttft=ttft)
        assert old.metrics is not None
        assert new.metrics is not None
        old.metrics.slo_attainment, new.metrics.slo_attainment = attained, attained - 0.01 * repeat  # overlap
        new.metrics.longest_stall_s = 1.4
        for run in (old, new):
            run.save(tmp_path)
    shown = section(tmp_path)
    assert "| output tokens / s | 400 | 500 | ×1.25 | better |" in shown
    assert "| longest stall | 900 ms | 1.40 s | ×1.56 | **worse** |" in shown
    found = verdicts(shown)
    assert [found[title] for title in ("TTFT p50", "TTFT p99")] == ["better", "better"]
    assert found["ITL p99"] == "**worse**"
    assert [found[title] for title in ("ITL p50", "SLO attainment")] == ["alike", "alike"]


def test_verdicts_and_ratios_take_three_complete_runs_of_each_server(tmp_path: Path) -> None:
    measured = {"results": tmp_path}
    for repeat in (1, 2, 3):
        assert stories.ratio(*COMPARED, "TTFT p99", **measured) == "(not measured yet)"
        save(tmp_path, repeats=[repeat])
        assert any(verdicts(section(tmp_path)).values()) == (repeat == 3)
    assert stories.ratio(*COMPARED, "TTFT p99", **measured) == "×0.50"
    assert stories.ratio(*COMPARED, "TTFT p99", "dummy:other", **measured) == "(not measured yet)"
    a_run("phase 5", 5, repeat=3, status="failed", metrics=None).save(tmp_path)
    assert not any(verdicts(section(tmp_path)).values())


def test_a_criterion_is_met_if_every_model_keeps_every_bound(tmp_path: Path) -> None:
    throughput = (*COMPARED, "output tokens / s")  # of 400 and 500
    results.groups.cache_clear()
    assert stories.criterion((*throughput, "≥ 1.25"), results=tmp_path).startswith("not measured | ")
    save(tmp_path)
    met = stories.criterion((*throughput, "≥ 1.25"), results=tmp_path)
    assert met == ("met | `continuous_batching`: output tokens / s ×1.25 (`dummy:llama-60m`) (asked: ≥ 1.25)")
    assert stories.criterion((*throughput, "≥ 1.26"), results=tmp_path).startswith("**missed** | ")
    two = stories.criterion((*throughput, "≥ 1.25"), (*COMPARED, "TTFT p99", "≤ 0.4"), results=tmp_path)
    assert two.startswith("**missed** | ")
    assert two.count("<br>") == 1
    assert stories.criterion((*throughput, "≥ 1.26"), model="dummy:other", results=tmp_path).startswith(
        "not measured | `continuous_batching`: output tokens / s (not measured yet)"
    )


def test_a_criterion_of_cells_is_met_if_every_cell_keeps_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stories, "measured_cell", lambda *_: "(not measured yet)")
    assert (
        stories.cells_criterion("t", "c", ("a", "≥ 1")) == "not measured | a: (not measured yet) (asked: ≥ 1)"
    )
    monkeypatch.setattr(stories, "measured_cell", lambda _table, _column, row: {"a": "1.5", "b": "0.97"}[row])
    met = stories.cells_criterion("table", "column", ("a", "≥ 1.5"), ("b", "≤ 0.97"))
    assert met == "met | a: 1.5 (asked: ≥ 1.5)<br>b: 0.97 (asked: ≤ 0.97)"
    assert stories.cells_criterion("table", "column", ("a", "≥ 1.5"), ("b", "≥ 1")).startswith(
        "**missed** | "
    )


def test_pages_are_made_of_complete_comparisons(tmp_path: Path) -> None:
    """A newer comparison that was killed between its repeats changes only the ledger, which names it."""

    def pages() -> list[str]:
        return [section(tmp_path)]

    lineup = Lineup(servers=["phase 4", "phase 5", "phase 6"], repeats=3)
    save(tmp_path)
    before = pages()
    assert all(before)
    save(tmp_path, comparison="20990101-000000", lineup=lineup, ttft=9.0)
    assert pages() == before
    shown = ledger.ledger(tmp_path)
    assert "6 runs in 1 comparisons" in shown
    assert "left out everywhere: `continuous_batching` of 2026-01-02 (6 runs)" in shown
    for repeat in (1, 2, 3):
        a_run("phase 6", 6, repeat=repeat, comparison="20990101-000000").save(tmp_path)
    assert all(new != old for new, old in zip(pages(), before, strict=True))
    assert "left out" not in ledger.ledger(tmp_path)


def test_sweeps_have_tables_of_their_own(tmp_path: Path) -> None:
    save(tmp_path, repeats=[1])
    for seats, ttft, comparison in ((1, 3.0, "20990101"), (2, 2.0, "20990101"), (9, 1.0, "20990202")):
        run = a_run(f"phase 5, seats={seats}", 5 + seats / 1000, ttft=ttft, comparison=f"{comparison}-000000")
        run.server.variant = {"seats": str(seats)}
        run.save(tmp_path / "local" if seats == 9 else tmp_path)
    results.groups.cache_clear()
    published, own = results.sweep_table("continuous_batching", "seats", results=tmp_path).split("\n\n**")
    lines = published.splitlines()
    column = next(line for line in lines if "TTFT p99" in line).split(" | ").index("TTFT p99")
    assert [line.split(" | ")[column] for line in lines if "seats=" in line] == ["3.00 s", "**2.00 s**"]
    assert "seats=9" in own
    assert "measured in this checkout" in own
    assert "|" not in results.sweep_table("continuous_batching", "others", results=tmp_path)
    # A sweep is newer here, but pages do not quote it as a comparison of phases.
    plain = section(tmp_path, "continuous_batching", "phase 5")
    assert "seats" not in plain
    assert "phase 4" in plain


def test_a_section_has_a_tab_for_each_model_with_one_picture_and_one_table(tmp_path: Path) -> None:
    entries = {}
    for model, comparison in (("a", "20260102-030400"), ("b", "20260102-030401")):
        server = {"label": "phase 5", "order": 5, "model": f"dummy:{model}"}
        for repeat in (1, 2, 3):
            a_run(repeat=repeat, comparison=comparison, server=server).save(tmp_path / "runs")
        for figure in ("bars", "cdf"):
            entries[f"{model}-{figure}"] = {
                "title": model,
                "caption": figure,
                "figure": figure,
                "workload": "continuous_batching",
                "model": f"dummy:{model}",
                "quick": False,
                "servers": ["phase 5"],
                "comparison": comparison,
                "size": [640, 480],
                "files": {theme: f"{model}-{figure}-{theme}.svg" for theme in ("light", "dark")},
            }
    folders = {"results": tmp_path / "runs", "folder": tmp_path / "plots"}
    folders["folder"].mkdir()
    (tmp_path / "plots" / "captions.json").write_text(json.dumps(entries))
    results.groups.cache_clear()
    asked = "continuous_batching", "phase 5"
    shown = stories.measured_section(*asked, first="cdf", **folders)
    left = stories.measured_rest(*asked, first="cdf", **folders)
    for text in (shown, left):
        assert re.findall(r'^=== "(.+)"', text, re.MULTILINE) == ["a", "b"]
    for model, part in zip("ab", shown.split("=== ")[1:], strict=True):
        assert part.index(f"{model}-cdf-light") < part.index("| TTFT p99 |")
        assert f"{model}-bars" not in part
        assert f"{model}-bars-light" in left
        assert f"{model}-cdf" not in left


def test_a_chart_keeps_its_marks_within_its_frame() -> None:
    curves = [charts.Curve("one", [(1, 0.3), (64, 900)]), charts.Curve("other", [(1, 5), (64, 5)])]
    drawn = charts.draw(curves, title="", x_title="rows", y_title="ms")
    shapes = " ".join(re.findall(r"<(?:circle|rect)[^>]+>", drawn))
    marks = re.findall(r'c?x="([\d.]+)" c?y="([\d.]+)"', shapes)
    assert len(marks) == 4
    assert all(0 <= float(x) <= charts.WIDTH and 0 <= float(y) <= charts.HEIGHT for x, y in marks)


def test_sentences_beside_a_chart_have_the_tables_slope_and_crossing(tmp_path: Path) -> None:
    MeasuredTable(
        name="batch_size",
        title="steps",
        setup={"model": "dummy:llama-60m in bfloat16", "reads": "20 GB/s", "multiplies": "1,000 GFLOP/s"},
        columns=["rows", "ms"],
        rows=[[1, 10.0], [4, 11.0], [9, 14.0]],
    ).save(tmp_path)
    assert charts.rows_at_crossing(tmp_path) == "50"
    assert charts.measured_slope("batch_size", "ms", tmp_path) == "0.5"
    assert charts.measured_ratio("batch_size", "ms", [1], [9], results=tmp_path) == "×1.40"
    assert charts.measured_ratio("batch_size", "ms", [1], [8], results=tmp_path) == "(not measured yet)"


def test_linear_axes_begin_at_0_and_have_equal_steps() -> None:
    curve = charts.Curve("one", [(1, 10), (2, 20), (4, 40), (64, 54)])
    drawn = charts.draw([curve], title="", x_title="rows", y_title="ms", linear=True)
    (first, y10), (second, y20), (third, y40), _ = (
        (float(x), float(y)) for x, y in re.findall(r'<circle[^>]+cx="([\d.]+)" cy="([\d.]+)"', drawn)
    )
    assert third - second == pytest.approx(2 * (second - first), abs=0.2)
    assert y20 - y40 == pytest.approx(2 * (y10 - y20), abs=0.2)
    assert ">0<" in drawn
    assert [label for label in ("1", "2", "4", "64") if f">{label}<" in drawn] == ["4", "64"], (
        "1 and 2 overlap 4"
    )


def test_bars_beside_vllm_are_the_newest_of_each_workload_on_one_machine(tmp_path: Path) -> None:
    for place, workload, ours, theirs, day, cpu in (
        (tmp_path, "mixed", 10, 20, 1, "a"),
        (tmp_path, "mixed", 100, 50, 2, "a"),
        (tmp_path, "single", 30, 60, 1, "a"),
        (tmp_path, "baseline", 1, 1, 1, "another"),
        (tmp_path / "local", "multi_turn", 1, 1, 3, "a"),
    ):
        for label, order, value in (("phase 9", 9, ours), ("vLLM 1.0", 100, theirs)):
            run = a_run(label, order, comparison=f"2026010{day}-000000", environment={"cpu": cpu, "cores": 2})
            assert run.metrics is not None
            run.workload.name, run.metrics.output_tokens_per_s = workload, value
            run.save(place)
    results.groups.cache_clear()
    shown = [(pair.workload, pair.ours, pair.theirs) for pair in peers.pairs(tmp_path)]
    assert shown == [("mixed", 100, 50), ("single", 30, 60)]
    chart = peers.peer_chart(tmp_path)
    assert chart.count("<rect") == 4
    assert {"phase 9", "vLLM 1.0"} <= set(re.findall(r"phase 9|vLLM 1\.0", chart))


def test_a_bar_chart_has_a_bar_for_each_row_as_long_as_its_value() -> None:
    measured = charts.newest("speculative")
    assert measured is not None
    drawn = charts.bar_chart("speculative", "phase 9 ÷ phase 10", title="", labels=100)
    widths = [float(width) for width in re.findall(r'<rect x="100" [^>]*width="([\d.]+)"', drawn)]
    values = [float(row[list(measured.columns).index("phase 9 ÷ phase 10")]) for row in measured.rows]
    assert len(widths) == len(values)
    assert widths == pytest.approx([value / max(values) * max(widths) for value in values], abs=0.1)
