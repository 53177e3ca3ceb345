"""Pages of the course compared with the code: overrides, the assembled step, and the three requests."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from common.startup.phases import find_phase, phase_names
from docs.building import overrides, stepper
from simulator import Timelines, run, simulate_engine
from tests.docs.support import ROOT

PHASE_PAGES = {name: ROOT / "docs" / "phases" / f"{name.partition('_')[2]}.md" for name in phase_names()}
ROLES = ("scheduler", "runner", "pool")


def section(page: Path, title: str) -> str:
    """Return the text below a page's heading of the second level."""
    return page.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


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


def test_the_times_of_the_three_requests_are_those_of_the_stepper() -> None:
    """The table has, for each phase and request, milliseconds until the first token / the complete answer."""
    text = (ROOT / "docs" / "what-a-server-does.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\d+): [^|]+ \| (\d.*) \|$", text, re.MULTILINE)
    assert [int(phase) for phase, _ in rows] == [find_phase(name).PHASE.number for name in phase_names()]
    for phase, cells in rows:
        setting = stepper.Setting(int(phase), seats=4, blocks=40, chunk=16, story="three")
        engine = simulate_engine(
            setting.phase, stepper.COST, acceptance=stepper.ACCEPTANCE, **setting.options()
        )
        seen = Timelines()
        run(engine, stepper.STORIES["three"].arrivals(), seen)
        times = {
            record.index: [round(1000 * (at - record.sent_s)) for at in record.token_times_s]
            for record in seen.requests
        }
        assert cells.split(" | ") == [f"{times[i][0]} / {times[i][-1]}" for i in (1, 2, 3)]
