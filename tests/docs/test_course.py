"""Pages that are made of the code: overrides, the step assembled, criteria, shapes, questions."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from common.phases import phase_names
from docs.building import charts, course, criteria, drawing, overrides, results, shapes, stories
from docs.building.criteria import Criterion
from tests.docs.conftest import ROOT
from tests.docs.test_text import a_run


@pytest.mark.parametrize("phase", phase_names())
def test_the_body_that_is_named_is_the_one_that_runs(phase: str) -> None:
    for cls in overrides.classes_of(phase).values():
        for name in overrides.method_names(cls):
            body = overrides.body_of(cls, name)
            assert body is not None
            found = inspect.getattr_static(cls, name)
            found = getattr(found, "fget", None) or getattr(found, "__func__", found)
            assert inspect.unwrap(found) is body.function, name


def test_a_table_of_overrides_has_every_method_once() -> None:
    for role in overrides.ROLES:
        table = overrides.overrides_table(role)
        rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        alike = re.findall(r"\[`(\w+)`\]", table.partition("One body for all phases:")[2])
        names = {
            name
            for phase in phase_names()
            for name in overrides.method_names(overrides.classes_of(phase)[role])
        }
        assert sorted(rows + alike) == sorted(names)
    assert "| `plan` | **[4][phase4_static.scheduler.StaticScheduler.plan]** |" in overrides.overrides_table(
        "scheduler"
    )


def test_a_step_is_assembled_of_the_bodies_that_it_calls() -> None:
    step = overrides.assembled_step("phase8_prefix")
    bodies = re.findall(r'\?\?\? quote "([\w.]+) · ([\w ]+) ·', step)
    assert len(bodies) == len(set(bodies))
    assert ("PrefixScheduler.admit", "this phase") in bodies
    assert ("PagedScheduler.admit", "phase 6") in bodies  # through super()
    assert ("PrefixCachingPool.register_prefix", "this phase") in bodies  # through the runner that all share
    assert ("ContinuousScheduler.admit", "phase 5") not in bodies  # overridden, and never called
    assert step.index("ContinuousScheduler._clear_seats") < step.index("PrefixScheduler.admit")


def test_every_criterion_names_tests_that_there_are() -> None:
    for phase in phase_names():
        table = criteria.exit_criteria(phase)
        assert table.count("\n") == len(criteria.criteria_of(phase)) + 2


def test_a_test_that_was_renamed_fails_the_build() -> None:
    for name in ("common/test_models.py::test_no_such", "common/test_nothing.py"):
        with pytest.raises(ValueError, match="test_no"):
            criteria.judged(Criterion("it works", tests=[name]))


def test_a_measured_criterion_is_met_missed_or_not_measured(tmp_path: Path) -> None:
    asked = {"workload": "continuous_batching", "before": "phase 4", "after": "phase 5"}
    faster = Criterion("faster", measured=[{**asked, "line": "TTFT p99", "at_most": 0.5}])
    slower = Criterion("slower", measured=[{**asked, "line": "TTFT p99", "at_least": 0.5}])
    assert criteria.judged(faster, tmp_path)[0] == "**not measured**"
    for repeat in (1, 2, 3):
        assert criteria.judged(faster, tmp_path)[0] == "**not measured**"  # fewer than three say little
        a_run("phase 4", 4, repeat=repeat, ttft=2.0).save(tmp_path)
        a_run("phase 5", 5, repeat=repeat, ttft=0.5).save(tmp_path)
        results.groups.cache_clear()
    assert criteria.judged(faster, tmp_path)[0] == "met"
    status, shown = criteria.judged(slower, tmp_path)
    assert status == "**missed**"
    assert shown == ["`continuous_batching`, `dummy:llama-60m`: TTFT p99 ×0.25 (asked: ≥ 0.5)"]
    compared = "continuous_batching", "phase 4", "phase 5", "TTFT p99"
    assert criteria.ratio(*compared, results=tmp_path) == "×0.25"
    assert criteria.ratio(*compared, model="dummy:other", results=tmp_path) == "(not measured yet)"


def test_what_is_open_is_never_met() -> None:
    assert criteria.judged(Criterion("on a GPU", open="there is none"))[0] == "**unverified**"
    held = Criterion("on a GPU", tests=["common/test_models.py"], open="there is none")
    assert criteria.judged(held)[0] == "**in part**"


def test_a_shape_that_is_not_so_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shapes.shapes_table().count("\n") == len(shapes.LINES) + 2
    wrong = shapes.LINES[0].__class__("embed", "", ("T F",), key="embed")
    monkeypatch.setattr(shapes, "LINES", (wrong,))
    with pytest.raises(AssertionError, match="embed returned"):
        shapes.shapes_table()


def test_the_sampler_is_asked_for_every_setting() -> None:
    for setting, params in drawing.SETTINGS.items():
        found = drawing.shares(setting)
        assert sum(found.values()) == pytest.approx(1.0)
        assert len(found) <= (params.top_k or len(found))
    assert max(drawing.shares("temperature 0.5").values()) > max(drawing.shares("temperature 2").values())


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
    assert re.findall(r"<strong>(\d):", course.course_picture()) == [str(number) for number in range(1, 10)]
