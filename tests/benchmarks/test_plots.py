"""Figures follow the results: the same results give the same bytes, other results other figures, none no figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.collections import LineCollection

import benchmarks.plots
from benchmarks.plots import CAPTIONS, draw_all, figures
from benchmarks.plots.groups import load_groups, thin, watched_client
from benchmarks.plots.style import THEMES
from benchmarks.results import Lineup, Run
from tests.benchmarks.conftest import make_run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def save(folder: Path, *runs: Run) -> None:
    for run in runs:
        run.save(folder)


KINDS = ("bars", "cdf", "stall", "kv", "waste")


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


def redraw(results: Path) -> dict[str, bytes]:
    out = results.parent / "out"
    written = draw_all(results, out)
    assert {path.name for path in written} | {CAPTIONS} == set(contents(out))
    return contents(out)


def test_every_figure_is_drawn_light_and_dark(drawn: dict[str, bytes]) -> None:
    names = {f"mixed-llama-tiny-{kind}-{theme}.svg" for kind in KINDS for theme in ("light", "dark")}
    assert set(drawn) == names | {CAPTIONS}
    assert all(drawn[name].startswith(b"<?xml") for name in names)
    for kind in KINDS:
        stem = f"mixed-llama-tiny-{kind}"
        assert drawn[f"{stem}-light.svg"] != drawn[f"{stem}-dark.svg"]


@pytest.mark.slow
def test_the_same_results_give_the_same_bytes(results: Path, drawn: dict[str, bytes]) -> None:
    assert redraw(results) == drawn


def test_figures_go_with_their_results_and_strangers_stay(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks.plots, "KINDS", benchmarks.plots.KINDS[:1])  # one kind is enough here
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


def test_every_figure_has_a_caption_and_names_its_files(drawn: dict[str, bytes]) -> None:
    captions = json.loads(drawn[CAPTIONS])
    assert set(captions) == {f"mixed-llama-tiny-{kind}" for kind in KINDS}
    assert all(entry["caption"] for entry in captions.values())
    assert {name for entry in captions.values() for name in entry["files"].values()} == set(drawn) - {
        CAPTIONS
    }


def test_a_clients_wait_is_drawn_from_its_request_on(results: Path) -> None:
    (group,) = load_groups(results)
    (stall,) = (kind for kind in figures.KINDS if kind.name == "stall")
    axes = stall.draw(group, THEMES[0]).axes[0]
    record = group.servers[0].typical.requests[watched_client(group)]
    (lines,) = (each for each in axes.collections if isinstance(each, LineCollection))
    first = lines.get_segments()[0][0][0]
    assert first == pytest.approx(record.token_times_s[1] - record.sent_s)
    assert axes.get_xlim()[0] == 0
    assert axes.get_title("right") == "first token after 200 ms"


def test_peers_without_telemetry_are_drawn_where_they_can_be(tmp_path: Path) -> None:
    save(tmp_path / "results", make_run("generate()", 100.0, steps=False))
    names = {path.name for path in draw_all(tmp_path / "results", tmp_path / "out")}
    assert {name.removeprefix("mixed-llama-tiny-").split("-")[0] for name in names} == {
        "bars",
        "cdf",
        "stall",
    }


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json"):
        draw_all(tmp_path / "results", tmp_path / "out")


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


def test_sweeps_are_not_drawn(tmp_path: Path) -> None:
    swept, plain = "20260202-000000", "20260101-000000"
    for place, label in enumerate(("phase 7, a", "phase 7, b"), 1):
        run = make_run(label, 7 + place / 1000, comparison=swept)
        run.server.variant = {"block-size": label[-1]}
        save(tmp_path, run)
    save(tmp_path, make_run("phase 6", 6, comparison=swept))
    assert load_groups(tmp_path) == []
    save(tmp_path, make_run("phase 6", 6, comparison=plain))
    (group,) = load_groups(tmp_path)
    assert group.first.comparison == plain


def test_a_comparison_that_was_cut_short_is_not_drawn(tmp_path: Path) -> None:
    whole, cut = Lineup(servers=["phase 4", "phase 5"], repeats=1), Lineup(servers=["phase 4"], repeats=2)
    for run in two_phases():
        run.lineup = whole
        save(tmp_path, run)
    save(tmp_path, make_run(comparison="20990101-000000", lineup=cut))
    (group,) = load_groups(tmp_path)
    assert group.first.comparison == "20260101-000000"
    save(tmp_path, make_run(comparison="20990101-000000", lineup=cut, repeat=2))
    (group,) = load_groups(tmp_path)
    assert len(group.servers) == 2  # the cut one is complete now, but has fewer servers
    (tmp_path / two_phases()[1].file_name).unlink()
    (group,) = load_groups(tmp_path)
    assert group.first.comparison == "20990101-000000"


def test_figures_of_the_readers_own_results_say_so(tmp_path: Path) -> None:
    save(tmp_path, make_run())
    save(tmp_path / "local", make_run())
    local, published = load_groups(tmp_path)
    assert local.name == f"local-{published.name}"
    assert local.title == f"{published.title} · measured in this checkout"


def test_a_run_that_is_killed_while_it_is_written_leaves_no_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def half(path: Path, content: bytes) -> int:
        write(path, content[: len(content) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half)
        with pytest.raises(KeyboardInterrupt):
            make_run().save(tmp_path)
    assert load_groups(tmp_path) == []
    save(tmp_path, make_run())
    assert len(load_groups(tmp_path)) == 1


def test_runs_that_failed_are_not_drawn(tmp_path: Path) -> None:
    failed = make_run("phase 5", 5)
    failed.status = "incomplete"
    save(tmp_path, make_run(), failed)
    (group,) = load_groups(tmp_path)
    assert [server.label for server in group.servers] == ["phase 4"]


def test_the_typical_repeat_is_the_median_one(tmp_path: Path) -> None:
    save(tmp_path, *(make_run(repeat=n, gap_s=gap) for n, gap in ((1, 0.01), (2, 0.05), (3, 0.02))))
    (group,) = load_groups(tmp_path)
    assert group.servers[0].typical.repeat == 3


def test_the_watched_client_is_a_long_early_one(tmp_path: Path) -> None:
    save(tmp_path, make_run())
    (group,) = load_groups(tmp_path)
    assert watched_client(group) == 1  # of the first two; the later two are longer


# ---------------------------------------------------------------------------------------------- derived


def test_thinning_keeps_peaks() -> None:
    values = [0.0] * 1000
    values[637] = 9.0
    times, kept = thin([float(n) for n in range(1000)], values, limit=100)
    assert len(kept) <= 100
    assert (637.0, 9.0) in zip(times, kept, strict=True)
    assert thin([0.0, 1.0], [5.0, 4.0]) == ([0.0, 1.0], [5.0, 4.0])
