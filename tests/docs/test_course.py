"""Pages that are made of the code and of results: overrides, steps, exit criteria, charts, questions, cards."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from common.phases import find_phase, phase_names
from docs.building import charts, overrides, results, stories
from tests.docs.conftest import ROOT
from tests.docs.test_text import a_run

PHASE_PAGES = {name: ROOT / "docs" / "phases" / f"{name.partition('_')[2]}.md" for name in phase_names()}
ROLES = ("scheduler", "runner", "pool")


def section(page: Path, title: str) -> str:
    """Return what a page has below a heading of the second level."""
    return page.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


# ---------------------------------------------------------------------- who overrides what


@pytest.mark.parametrize("phase", phase_names())
def test_the_class_that_is_named_is_the_one_whose_body_runs(phase: str) -> None:
    for cls in overrides.classes_of(phase).values():
        for name in overrides.written_by_phases(cls):
            owner = overrides.owner_of(cls, name)
            assert owner is not None
            assert vars(owner)[name] is inspect.getattr_static(cls, name), name


def test_a_table_of_overrides_has_every_method_of_a_phase_once() -> None:
    for role in ROLES:
        rows = re.findall(r"^\| `(\w+)` \|", overrides.overrides_table(role), re.MULTILINE)
        classes = [overrides.classes_of(phase)[role] for phase in phase_names()]
        assert sorted(rows) == sorted({name for cls in classes for name in overrides.written_by_phases(cls)})
    table = overrides.overrides_table("scheduler")
    assert "| `plan` | **[4][phase4_static.scheduler.StaticScheduler.plan]** |" in table


@pytest.mark.parametrize("phase", phase_names())
def test_the_step_of_a_page_is_the_one_that_runs(phase: str) -> None:
    """Each row's first link is the body that runs, and the others are bodies of the phase's classes."""
    classes = overrides.classes_of(phase)
    assembled = section(PHASE_PAGES[phase], "The step, assembled")
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| (.+?) \| (.*) \|$", assembled, re.MULTILINE)
    assert len(rows) == 8
    above = {owner.__name__: owner for cls in classes.values() for owner in cls.__mro__}
    for role, name, body, called in rows:
        owner = overrides.owner_of(classes[role], name)
        assert owner is not None
        assert f"[`{owner.__name__}.{name}`][{owner.__module__}.{owner.__name__}.{name}]" in body
        for link in [body, *called.split(", ")] if called else [body]:
            [(cls, method)] = re.findall(r"\[`(\w+)\.(\w+)`\]", link)
            assert method in vars(above[cls]), link
            assert link.startswith("**") == above[cls].__module__.startswith(f"{phase}."), link


# ---------------------------------------------------------------------- exit criteria


@pytest.mark.parametrize("phase", phase_names())
def test_tests_that_show_a_criterion_exist(phase: str) -> None:
    rows = re.findall(r"^\| .+ \| (.+) \| (.+) \|$", section(PHASE_PAGES[phase], "Done when"), re.MULTILINE)
    assert len(rows) >= 6
    for _, shown in rows:
        for part in shown.split("<br>"):
            files, names = re.findall(r"`(tests/.+?)`", part), re.findall(r"`(test_\w+)`", part)
            assert len(files) == 1 or not names
            for file in files:
                defined = set(
                    re.findall(r"^def (\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
                )
                assert set(names) <= defined, file


@pytest.mark.parametrize("phase", phase_names())
def test_a_measured_criterion_is_met_or_missed_as_the_page_says(phase: str) -> None:
    page = PHASE_PAGES[phase]
    rows = re.findall(r"^\| .+ \| (.+) \| (.+\(asked: .+) \|$", section(page, "Done when"), re.MULTILINE)
    assert rows
    for status, shown in rows:
        met = []
        asked = re.findall(
            r'\{\{ (ratios?)\((".+?")(?:, model="(.+?)")?\) \}\} \(asked: (≥|≤) ([\d.]+)\)', shown
        )
        assert len(asked) == shown.count("(asked: ")
        for function, arguments, model, sign, bound in asked:
            found = dict(stories.model_ratios(*re.findall(r'"(.+?)"', arguments)))
            values = found.values() if function == "ratios" else [found[model or "dummy:llama-60m"]]
            assert values
            met += [value >= float(bound) if sign == "≥" else value <= float(bound) for value in values]
        assert status == ("met" if all(met) else "**missed**"), shown


def test_a_ratio_takes_three_runs_of_each_server(tmp_path: Path) -> None:
    compared = "continuous_batching", "phase 4", "phase 5", "TTFT p99"
    for repeat in (1, 2, 3):
        assert stories.ratio(*compared, results=tmp_path) == "(not measured yet)"
        assert stories.ratios(*compared, results=tmp_path) == "(not measured yet)"
        a_run("phase 4", 4, repeat=repeat, ttft=2.0).save(tmp_path)
        a_run("phase 5", 5, repeat=repeat, ttft=0.5).save(tmp_path)
        results.groups.cache_clear()
    assert stories.ratio(*compared, results=tmp_path) == "×0.25"
    assert stories.ratios(*compared, results=tmp_path) == "×0.25 (`dummy:llama-60m`)"
    assert stories.ratio(*compared, model="dummy:other", results=tmp_path) == "(not measured yet)"


# ---------------------------------------------------------------------- sections, charts, questions, cards


def test_a_section_has_a_tab_for_each_model_and_its_picture_first(tmp_path: Path) -> None:
    for model in ("dummy:a", "dummy:b"):
        for repeat in (1, 2, 3):
            for run in (a_run("phase 4", 4, repeat=repeat), a_run("phase 5", 5, repeat=repeat)):
                run.server.model = model
                run.comparison = f"20260102-03040{model[-1] == 'b':d}"
                run.save(tmp_path / "runs")
    entries = {
        f"{model}-{figure}": {
            "title": model,
            "caption": figure,
            "figure": figure,
            "workload": "continuous_batching",
            "model": f"dummy:{model}",
            "quick": False,
            "servers": ["phase 4", "phase 5"],
            "comparison": f"20260102-03040{model == 'b':d}",
            "size": [640, 480],
            "files": {"light": f"{model}-{figure}-l.svg", "dark": f"{model}-{figure}-d.svg"},
        }
        for model in "ab"
        for figure in ("bars", "cdf")
    }
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "captions.json").write_text(json.dumps(entries))
    compared = "continuous_batching", "phase 4", "phase 5"
    folders = {"results": tmp_path / "runs", "folder": tmp_path / "plots"}
    results.groups.cache_clear()
    section = stories.measured_section(*compared, first="cdf", **folders)
    assert re.findall(r'^=== "(.+)"', section, re.MULTILINE) == ["a", "b"]
    for model, part in zip("ab", section.split("=== ")[1:], strict=True):
        assert (
            part.index(f"{model}-cdf-l.svg") < part.index("All numbers") < part.index(f"{model}-bars-l.svg")
        )
    assert "measure" in stories.measured_section("mixed", "phase 4", first="cdf", **folders)


def test_charts_of_what_was_not_measured_are_left_out(tmp_path: Path) -> None:
    assert charts.line_chart("batch_size", "rows", "step, ms", title="", y_title="", results=tmp_path) == ""
    assert charts.measured_cell("batch_size", "step, ms", 8, tmp_path) == "(not measured yet)"


def test_a_chart_keeps_its_marks_within_its_frame() -> None:
    curves = [charts.Curve("one", [(1, 0.3), (64, 900)]), charts.Curve("other", [(1, 5), (64, 5)])]
    drawn = charts.draw(curves, title="", x_title="rows", y_title="ms")
    marks = re.findall(
        r'c?x="([\d.]+)" c?y="([\d.]+)"', " ".join(re.findall(r"<(?:circle|rect)[^>]+>", drawn))
    )
    assert len(marks) == 4
    assert all(0 <= float(x) <= charts.WIDTH and 0 <= float(y) <= charts.HEIGHT for x, y in marks)


def test_there_are_ten_questions_for_every_phase_and_each_has_its_section() -> None:
    text = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
    parts = re.split(r"^## Phase (\d): .*$", text, flags=re.MULTILINE)[1:]
    assert parts[::2] == [str(number) for number in range(1, 10)]
    for part in parts[1::2]:
        questions = re.findall(r'^\?\?\? question "(.+)"\n\n    (.+)$', part, re.MULTILINE)
        assert len(questions) >= 10
        assert all(re.search(r"See \[.+\]\([\w/-]+\.md#[\w-]+\)\.$", answer) for _, answer in questions)


def test_every_phase_has_a_card() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    cards = re.findall(r"<strong>(\d): (.+?)</strong><span>(.+?)</span>", text)
    assert [int(number) for number, *_ in cards] == list(range(1, 10))
    phases = [find_phase(name).PHASE for name in phase_names()]
    assert cards[3:] == [(str(phase.number), phase.title, phase.idea) for phase in phases]
