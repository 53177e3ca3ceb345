"""Published results are smaller than the runs that they are made of, and have the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks.__main__ as command_line
from benchmarks.files import PUBLISHED, latencies_of, load_comparisons, publish
from benchmarks.metrics import summarize
from benchmarks.plots import draw_all
from benchmarks.results import RESULTS, Lineup, Metrics, Run
from tests.benchmarks.conftest import make_run, save

GAPS = (0.012, 0.05, 0.02)  # the third run has the median throughput


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


def test_only_the_typical_run_keeps_its_timeline(tmp_path: Path, runs: list[Run]) -> None:
    publish(tmp_path / "runs", tmp_path / "out")
    (found,) = load_comparisons(tmp_path / "out")
    assert [run.repeat for run in found.runs if run.requests] == [3, 3]
    assert [run.requests for run in found.runs if run.requests] == [runs[2].requests, runs[5].requests]
    assert [run.metrics for run in found.runs] == [run.metrics for run in runs]
    assert [run.server_metrics for run in found.runs] == [run.server_metrics for run in runs]
    assert found.latencies == {"phase 4": latencies_of(runs[:3]), "phase 5": latencies_of(runs[3:])}


@pytest.mark.slow
def test_figures_of_published_runs_are_those_of_the_runs(tmp_path: Path, runs: list[Run]) -> None:
    publish(tmp_path / "runs", tmp_path / "out")
    drawn = []
    for name in ("runs", "out"):
        draw_all(tmp_path / name, tmp_path / f"{name}-figures")
        drawn.append({path.name: path.read_bytes() for path in (tmp_path / f"{name}-figures").iterdir()})
    assert drawn[0] == drawn[1]
    assert runs


def test_publishing_adds_to_what_was_published(tmp_path: Path, runs: list[Run]) -> None:
    out = tmp_path / "out"
    publish(tmp_path / "runs", out)
    before = (out / f"mixed{PUBLISHED}").read_bytes()
    publish(tmp_path / "runs", out)  # the same comparison is replaced
    assert (out / f"mixed{PUBLISHED}").read_bytes() == before
    save(tmp_path / "later", make_run(comparison="20270101-000000"), make_run(workload="baseline"))
    publish(tmp_path / "later", out, only=["20270101-000000"])
    first, second = load_comparisons(out)
    assert (len(first.runs), second.first.comparison) == (len(runs), "20270101-000000")


def test_a_comparison_that_was_cut_short_is_not_published(tmp_path: Path) -> None:
    save(tmp_path / "runs", make_run(lineup=Lineup(servers=["phase 4", "phase 5"], repeats=1)))
    command = ["publish", "--results", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert command_line.main(command) == 2
    assert not (tmp_path / "out").exists()


def test_a_run_that_failed_is_published_and_counts_nowhere(tmp_path: Path) -> None:
    failed = make_run(repeat=2)
    failed.status, failed.metrics, failed.requests, failed.engine_steps = "failed", None, [], None
    good = make_run()
    save(tmp_path / "runs", good, failed)
    publish(tmp_path / "runs", tmp_path / "out")
    (found,) = load_comparisons(tmp_path / "out")
    assert [run.status for run in found.runs] == ["ok", "failed"]
    assert found.latencies["phase 4"] == latencies_of([good])


@pytest.mark.parametrize("name", ["a.json", f"mixed{PUBLISHED}"])
@pytest.mark.parametrize("content", ["{}", "no JSON"])
def test_a_file_without_runs_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        load_comparisons(tmp_path)


def numbers(metrics: Metrics) -> dict[str, float]:
    """Return every number of the metrics, by its field and, in a latency, by its statistic."""
    found: dict[str, float] = {}
    for field, value in metrics.model_dump(exclude_none=True).items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        found |= {f"{field}.{statistic}": number for statistic, number in inner}
    return found


def test_published_metrics_are_those_of_the_published_requests() -> None:
    for each in load_comparisons(RESULTS):
        for run in each.runs:
            if run.requests and run.metrics is not None:
                limits = {"slo_ttft_s": run.metrics.slo_ttft_s, "slo_itl_s": run.metrics.slo_itl_s}
                # Since Python 3.12, sums of floats, and so means, have other last digits.
                expected = pytest.approx(numbers(run.metrics), rel=1e-12, abs=0)
                assert numbers(summarize(run.requests, **limits)) == expected, run.file_name
