"""The chart beside vLLM: of which comparisons it is made."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import Lineup
from docs.building import peers, results
from tests.benchmarks.conftest import make_run


def saved(
    folder: Path, workload: str, ours: float, theirs: float, *, comparison: str, cpu: str = "a"
) -> None:
    lineup = Lineup(servers=["phase 9", "vLLM 1.0"], repeats=1)
    for label, order, value in (("phase 9", 9, ours), ("vLLM 1.0", 100, theirs)):
        run = make_run(label, order, workload=workload, comparison=comparison, lineup=lineup)
        assert run.metrics is not None
        run.metrics.output_tokens_per_s = value
        run.environment = {"cpu": cpu, "cores": 2}
        run.save(folder)


def test_the_newest_comparison_of_each_workload_on_one_machine(tmp_path: Path) -> None:
    results.groups.cache_clear()
    saved(tmp_path, "mixed", 10, 20, comparison="20260101-000000")
    saved(tmp_path, "mixed", 100, 50, comparison="20260102-000000")
    saved(tmp_path, "single", 30, 60, comparison="20260101-000000")
    saved(tmp_path, "baseline", 1, 1, comparison="20260101-000000", cpu="another")
    saved(tmp_path / "local", "multi_turn", 1, 1, comparison="20260103-000000")
    shown = [(pair.workload, pair.ours, pair.theirs) for pair in peers.pairs(tmp_path)]
    assert shown == [("mixed", 100, 50), ("single", 30, 60)]
    bars = peers.peer_bars(tmp_path).splitlines()
    assert [line.count("█") + line.count("░") for line in bars[2:]] == [40, 20, 12, 24]
    chart = peers.peer_chart(tmp_path)
    assert chart.count("<rect") == 4
    assert "phase 9" in chart
    assert "vLLM 1.0 is its build for CPUs" in chart
    results.groups.cache_clear()


def test_without_a_comparison_it_says_so(tmp_path: Path) -> None:
    assert "has been measured yet" in peers.peer_chart(tmp_path)
