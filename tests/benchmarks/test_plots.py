"""Figures follow the results: the same results give the same bytes, other results other figures, none no figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.plots
from benchmarks.plots import CAPTIONS, KINDS, draw_all
from benchmarks.plots.groups import load_groups, thin
from benchmarks.results import Run
from tests.benchmarks.conftest import make_run, save


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


NAMES = ("bars", "cdf", "stall", "kv", "waste")


def two_phases() -> tuple[Run, Run]:
    return make_run("phase 4", 4, gap_s=0.02), make_run("phase 5", 5, gap_s=0.01)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    save(tmp_path / "results", *two_phases())
    return tmp_path / "results"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The figures of `results`: names and bytes."""
    folder = tmp_path_factory.mktemp("drawn")
    save(folder / "results", *two_phases())
    draw_all(folder / "results", folder / "out")
    return contents(folder / "out")


@pytest.mark.slow
def test_every_figure_is_drawn_light_and_dark(drawn: dict[str, bytes]) -> None:
    names = {f"mixed-llama-tiny-{kind}-{theme}.svg" for kind in NAMES for theme in ("light", "dark")}
    assert set(drawn) == names | {CAPTIONS}
    assert all(drawn[name].startswith(b"<?xml") for name in names)
    for kind in NAMES:
        stem = f"mixed-llama-tiny-{kind}"
        assert drawn[f"{stem}-light.svg"] != drawn[f"{stem}-dark.svg"]


def test_figures_go_with_their_results_and_strangers_stay(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks.plots, "KINDS", KINDS[:1])  # one figure is enough here
    out = tmp_path / "out"
    save(results, make_run(workload="baseline"))
    draw_all(results, out)
    (out / "drawn-by-hand.svg").write_text("<svg/>")
    for path in results.glob("baseline-*"):
        path.unlink()
    draw_all(results, out)
    assert not list(out.glob("baseline-*"))
    assert list(out.glob("mixed-*"))
    for path in results.iterdir():
        path.unlink()
    assert draw_all(results, out) == []
    assert set(contents(out)) == {CAPTIONS, "drawn-by-hand.svg"}
    assert json.loads((out / CAPTIONS).read_text()) == {}


# ---------------------------------------------------------------------------------------------- groups


def test_comparisons_are_not_mixed(tmp_path: Path) -> None:
    old, new = "20260101-000000", "20260202-000000"
    save(tmp_path, make_run("phase 4", 4, comparison=old), make_run("phase 5", 5, comparison=old))
    save(tmp_path, make_run("phase 5", 5, comparison=new))
    (group,) = load_groups(tmp_path)
    assert {run.comparison for server in group.servers for run in server.runs} == {old}  # more servers
    save(tmp_path, make_run("phase 6", 6, comparison=new))
    later, earlier = load_groups(tmp_path)
    assert {run.comparison for server in later.servers for run in server.runs} == {new}
    assert [server.label for server in later.servers] == ["phase 5", "phase 6"]
    assert [server.label for server in earlier.servers] == [
        "phase 4",
        "phase 5",
    ]  # no other figure has phase 4
    save(tmp_path, make_run("phase 4", 4, comparison=new))
    (group,) = load_groups(tmp_path)
    assert len(group.servers) == 3


def test_quick_runs_and_other_machines_are_groups_of_their_own(tmp_path: Path) -> None:
    save(tmp_path, make_run(), make_run(quick=True))
    save(tmp_path / "h200", make_run())
    assert [group.name for group in load_groups(tmp_path)] == [
        "h200-mixed-llama-tiny",
        "mixed-llama-tiny",
        "mixed-llama-tiny-quick",
    ]


def test_runs_that_failed_are_not_drawn(tmp_path: Path) -> None:
    failed = make_run("phase 5", 5)
    failed.status = "incomplete"
    save(tmp_path, make_run(), failed)
    (group,) = load_groups(tmp_path)
    assert [server.label for server in group.servers] == ["phase 4"]


# ---------------------------------------------------------------------------------------------- derived


def test_thinning_keeps_peaks() -> None:
    values = [0.0] * 1000
    values[637] = 9.0
    times, kept = thin([float(n) for n in range(1000)], values, limit=100)
    assert len(kept) <= 100
    assert (637.0, 9.0) in zip(times, kept, strict=True)
    assert thin([0.0, 1.0], [5.0, 4.0]) == ([0.0, 1.0], [5.0, 4.0])
