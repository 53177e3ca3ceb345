"""Pages of phases compared with the code: overrides, steps, exit criteria, the three requests."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from common.startup.phases import find_phase, phase_names
from docs.building import overrides, stories, three
from tests.docs.support import ROOT

PHASE_PAGES = {name: ROOT / "docs" / "phases" / f"{name.partition('_')[2]}.md" for name in phase_names()}
ROLES = ("scheduler", "runner", "pool")


def section(page: Path, title: str) -> str:
    """Return the text below a page's heading of the second level."""
    return page.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


# ---------------------------------------------------------------------- overrides


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
    """The first link of each row names the method that runs. The others name methods of the phase's classes."""
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
def test_a_criterion_names_the_file_of_its_tests(phase: str) -> None:
    rows = re.findall(r"^\| .+ \| (.+) \| (.+) \|$", section(PHASE_PAGES[phase], "Done when"), re.MULTILINE)
    assert len(rows) >= 6
    for _, shown in rows:
        for part in shown.split("<br>"):
            assert len(re.findall(r"`(tests/.+?)`", part)) == 1 or "`test_" not in part


@pytest.mark.parametrize("phase", phase_names())
def test_whether_a_measured_criterion_is_met_is_computed(phase: str) -> None:
    done_when = section(PHASE_PAGES[phase], "Done when")
    assert "criterion(" in done_when
    assert "(asked: " not in done_when, "a bound beside a figure, with a status written by hand"


# ---------------------------------------------------------------------- the start page, and the three requests


def test_the_start_page_has_every_phase_with_its_idea_and_a_figure() -> None:
    rows = re.findall(
        r"^\| \[(\d+): (.+?)\]\((.+?)\) \| (.+?) \| (.*?) \|$", stories.headline_table(), re.MULTILINE
    )
    assert [int(number) for number, *_ in rows] == list(range(1, 1 + len(rows)))
    phases = [find_phase(name).PHASE for name in phase_names()]
    assert [(number, title, idea) for number, title, _, idea, _ in rows[3:]] == [
        (str(phase.number), phase.title, phase.idea) for phase in phases
    ]
    assert all((ROOT / "docs" / page).is_file() for _, _, page, *_ in rows)
    assert all("×" in figure for *_, figure in rows[3:])


def test_the_three_requests_show_what_their_pages_say() -> None:
    served = {phase: three.served(phase) for phase in range(4, 11)}
    question, document, turn = (
        {phase: found[place] for phase, found in served.items()} for place in (1, 2, 3)
    )
    everybody = (question, document, turn)
    assert min(each[4].waited for each in (question, document)) > 150, "they wait for the batch before"
    assert max(each[phase].waited for each in everybody for phase in range(5, 10)) < 20
    assert {each[4].held for each in everybody} == {88 + 12}
    assert {each[5].held for each in everybody} == {128}
    assert question[5].gap > 3 * question[7].gap, "the document's prompt is one step of phase 5"
    assert [each[6].held for each in everybody] == [24, 104, 64]
    for each in everybody:
        same = [dataclasses.replace(each[phase], held=0) for phase in (5, 6)]
        assert same[0] == same[1], "phase 6 changes the memory only"
        assert each[9].finished < each[8].finished
        assert each[9].gap < each[8].gap
        assert each[10].gap >= each[9].gap
    assert document[7].first > document[6].first
    assert turn[8].first < turn[7].first / 3
    assert turn[9].first > turn[8].first
    assert all(each[10].first > each[9].first for each in (document, turn))
    assert all(each[10].finished < each[9].finished for each in (question, document))
    assert turn[10].finished > turn[9].finished
