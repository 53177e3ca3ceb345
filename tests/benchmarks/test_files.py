"""Published results are smaller than the runs that they are made of, and have the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.__main__ as command_line
from benchmarks.files import PUBLISHED, TIMELINES, Latencies, load_comparisons, load_runs, publish
from benchmarks.metrics import summarize
from benchmarks.plots import CAPTIONS, draw_all
from benchmarks.results import RESULTS, Lineup, Metrics, Run
from tests.benchmarks.conftest import make_run

GAPS = (0.012, 0.05, 0.02)  # the third run has the median throughput


def save(folder: Path, *runs: Run) -> None:
    for run in runs:
        run.save(folder)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Three runs of two servers, in `tmp_path / "runs"`."""
    made = [
        make_run(f"phase {order}", order, repeat=repeat, gap_s=gap * 4 / order)
        for order in (4, 5)
        for repeat, gap in enumerate(GAPS, 1)
    ]
    save(tmp_path / "runs", *made)
    return made


def test_everything_comes_back_where_all_timelines_are_kept(tmp_path: Path, runs: list[Run]) -> None:
    publish(tmp_path / "runs", tmp_path / "out", timelines="all")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"mixed{PUBLISHED}", f"mixed{TIMELINES}"}
    (found,) = load_comparisons(tmp_path / "out")
    assert found.runs == runs
    assert found.latencies["phase 5"] == Latencies.of(runs[3:])


def test_only_the_typical_run_keeps_its_timeline(tmp_path: Path, runs: list[Run]) -> None:
    publish(tmp_path / "runs", tmp_path / "out")
    (found,) = load_comparisons(tmp_path / "out")
    assert [run.repeat for run in found.runs if run.requests] == [3, 3]
    assert [run for run in found.runs if run.requests] == [runs[2], runs[5]]
    assert [run.metrics for run in found.runs] == [run.metrics for run in runs]
    assert [run.server_metrics for run in found.runs] == [run.server_metrics for run in runs]
    assert found.latencies["phase 4"] == Latencies.of(runs[:3])
    for run in found.runs:
        if run.requests and run.metrics is not None:
            assert summarize(run.requests, slo_ttft_s=1.0, slo_itl_s=0.1) == run.metrics


def test_figures_of_published_runs_are_those_of_the_runs(tmp_path: Path, runs: list[Run]) -> None:
    publish(tmp_path / "runs", tmp_path / "out")
    drawn = []
    for name in ("runs", "out"):
        draw_all(tmp_path / name, tmp_path / f"{name}-figures")
        drawn.append({path.name: path.read_bytes() for path in (tmp_path / f"{name}-figures").iterdir()})
    assert drawn[0] == drawn[1]
    assert runs


def test_without_timelines_there_are_fewer_figures(tmp_path: Path, runs: list[Run]) -> None:
    publish(tmp_path / "runs", tmp_path / "out", timelines="none")
    assert not list((tmp_path / "out").glob(f"*{TIMELINES}"))
    draw_all(tmp_path / "out", tmp_path / "figures")
    captions = json.loads((tmp_path / "figures" / CAPTIONS).read_text())
    assert {entry["figure"] for entry in captions.values()} == {"bars", "cdf"}
    assert runs


def test_publishing_adds_to_what_was_published(tmp_path: Path, runs: list[Run]) -> None:
    out = tmp_path / "out"
    publish(tmp_path / "runs", out, timelines="all")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    publish(tmp_path / "runs", out, timelines="all")  # the same comparison is replaced
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    later = make_run(comparison="20270101-000000")
    save(tmp_path / "later", later, make_run(workload="baseline"))
    publish(tmp_path / "later", out, only=["20270101-000000"])
    first, second = load_comparisons(out)
    assert (first.runs, second.runs) == (runs, [later])


def test_what_was_cut_short_is_not_published(tmp_path: Path) -> None:
    save(tmp_path / "runs", make_run(lineup=Lineup(servers=["phase 4", "phase 5"], repeats=1)))
    assert publish(tmp_path / "runs", tmp_path / "out") == []
    command = ["publish", "--results", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert command_line.main(command) == 2
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "runs", make_run(quick=True))
    command = ["publish", "--results", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert command_line.main(command) == 0
    assert "20260101-000000: mixed (quick), zoo:llama-tiny, runs: 1" in capsys.readouterr().out


def test_a_run_that_failed_is_published_and_counts_nowhere(tmp_path: Path) -> None:
    failed = make_run(repeat=2)
    failed.status, failed.metrics, failed.requests, failed.engine_steps = "failed", None, [], None
    good = make_run()
    save(tmp_path / "runs", good, failed)
    publish(tmp_path / "runs", tmp_path / "out")
    (found,) = load_comparisons(tmp_path / "out")
    assert [run.status for run in found.runs] == ["ok", "failed"]
    assert found.latencies["phase 4"] == Latencies.of([good])


def test_runs_beside_published_ones_are_read_too(tmp_path: Path, runs: list[Run]) -> None:
    """If a comparison is in both kinds of files, its runs' own files count."""
    publish(tmp_path / "runs", tmp_path / "runs", timelines="none")
    save(tmp_path / "runs", make_run(workload="baseline"))
    baseline, mixed = load_comparisons(tmp_path / "runs")
    assert baseline.runs[0].workload.name == "baseline"
    assert mixed.runs == runs
    assert len(load_runs(tmp_path / "runs")) == 7


@pytest.mark.parametrize("content", ["{}", "[{}]", "no JSON"])
def test_a_published_file_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / f"mixed{PUBLISHED}").write_text(content)
    with pytest.raises(ValueError, match=r"mixed\.published\.json"):
        load_comparisons(tmp_path)


def numbers(metrics: Metrics) -> dict[str, float]:
    """Return every number of the metrics, by its field and, in a latency, by its statistic."""
    found: dict[str, float] = {}
    for field, value in metrics.model_dump(exclude_none=True).items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        found |= {f"{field}.{statistic}": number for statistic, number in inner}
    return found


def test_what_is_published_here_is_small_and_whole() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file() and "local" not in path.parts]
    assert len(files) <= 67
    assert sum(path.stat().st_size for path in files) <= 6e6
    for each in load_comparisons(RESULTS):
        for run in each.runs:
            if run.requests and run.metrics is not None:
                limits = {"slo_ttft_s": run.metrics.slo_ttft_s, "slo_itl_s": run.metrics.slo_itl_s}
                # Since Python 3.12, sums of floats, and so means, have other last digits.
                expected = pytest.approx(numbers(run.metrics), rel=1e-12, abs=0)
                assert numbers(summarize(run.requests, **limits)) == expected, run.file_name
