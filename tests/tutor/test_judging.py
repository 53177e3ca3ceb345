"""The judge: the original passes, the emptied tree says what it owes, half-right solutions get their hint."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.phases import phase_names
from tutor.emptying import set_up
from tutor.exercise import Exercise, load_exercise
from tutor.judging import hint_for, judge, report

pytestmark = pytest.mark.slow

PHASES = phase_names()


@dataclass(frozen=True)
class HalfRight:
    """A solution with a mistake: the original, with some of its text replaced, and how its hint begins."""

    phase: str
    file: str
    changes: tuple[tuple[str, str], ...]
    hint: str


HALF_RIGHT = {
    "a timer that is set back": HalfRight(
        "phase4_static",
        "scheduler.py",
        (("        elif self._forming_since is None:\n", "        else:\n"),),
        "The time runs from the first who came",
    ),
    "members that leave one by one": HalfRight(
        "phase4_static",
        "scheduler.py",
        (
            (
                "        if not all(request.is_terminal for request in self._active):\n            return []\n",
                "",
            ),
            ("        done, self._active = self._active, []\n        return done", "        return []"),
        ),
        "A batch leaves whole",
    ),
    "logits of the rectangle's end": HalfRight(
        "phase4_static",
        "runner.py",
        (("is_terminal else chunk.end - 1", "is_terminal else longest - 1"),),
        "A row's next token is chosen by the logits of its last real token",
    ),
    "idle rows that wander": HalfRight(
        "phase4_static",
        "runner.py",
        (("column = max(length - 1, 0)", "column = length"),),
        "An idle row stands still",
    ),
    "a full block and one more": HalfRight(
        "phase6_paged",
        "cache.py",
        (("return -(-tokens // self._block_size)", "return tokens // self._block_size + 1"),),
        "Whole blocks, rounded up",
    ),
    "blocks freed twice": HalfRight(
        "phase6_paged",
        "allocator.py",
        (("if wrong or len(set(blocks)) != len(blocks):", "if False:"),),
        "A block that is freed twice",
    ),
    "no reserve": HalfRight(
        "phase6_paged",
        "scheduler.py",
        (("free * (1 - GROWTH_RESERVE)", "free"),),
        "Newcomers leave GROWTH_RESERVE",
    ),
    "a reserve for nobody": HalfRight(
        "phase6_paged",
        "scheduler.py",
        (("(cost > budget and self._active)", "cost > budget"),),
        "With nobody active nobody grows",
    ),
    "some overtake": HalfRight(
        "phase6_paged",
        "scheduler.py",
        (
            (
                "        while self.waiting and self.free_seats > 0:\n            request = self.waiting[0]\n",
                "        for request in list(self.waiting)[: self.free_seats]:\n",
            ),
            (
                "                return\n            self.waiting.popleft()",
                "                continue\n            self.waiting.remove(request)",
            ),
        ),
        "First come, first served",
    ),
    "preempted to the back": HalfRight(
        "phase6_paged",
        "scheduler.py",
        (("self.waiting.appendleft(request)", "self.waiting.append(request)"),),
        "Who is preempted arrived before all who wait",
    ),
}


def copy_of(exercise: Exercise, tree: Path) -> Path:
    shutil.copytree(exercise.source, tree / exercise.package)
    return tree


@pytest.mark.parametrize("phase", PHASES)
def test_the_original_holds(phase: str, tmp_path: Path) -> None:
    exercise = load_exercise(phase)
    judgement = judge(exercise, copy_of(exercise, tmp_path))
    assert judgement.all_hold, report(exercise, judgement)
    assert len(judgement.held) == sum(len(idea.tests) for idea in exercise.ideas)


@pytest.mark.parametrize("phase", PHASES)
def test_the_emptied_tree_says_what_it_owes(phase: str, tmp_path: Path) -> None:
    exercise = load_exercise(phase)
    taken = set_up(exercise, tmp_path / "tree")
    judgement = judge(exercise, tmp_path / "tree")
    methods = [method for each in taken.values() for method in each]
    assert judgement.unwritten
    assert all(why.partition(":")[0] in methods for why in judgement.unwritten.values())
    said = report(exercise, judgement)
    for idea in exercise.ideas:
        assert f"{idea.title} " in said
        assert judgement.unwritten.keys() & set(idea.tests), f"{idea.title} judges nothing that was taken out"
    assert "to be written: " in said


@pytest.mark.parametrize("name", HALF_RIGHT)
def test_a_half_right_solution_gets_its_hint(name: str, tmp_path: Path) -> None:
    half = HALF_RIGHT[name]
    exercise = load_exercise(half.phase)
    path = copy_of(exercise, tmp_path) / exercise.package / half.file
    text = path.read_text()
    for old, new in half.changes:
        assert text.count(old) == 1, f"the original has changed: {old!r}"
        text = text.replace(old, new)
    path.write_text(text)
    judgement = judge(exercise, tmp_path)
    assert not judgement.all_hold
    assert hint_for(exercise, judgement).startswith(half.hint), report(exercise, judgement)


def test_every_hint_is_somebodys() -> None:
    for phase in PHASES:
        hints = {hint.says for hint in load_exercise(phase).hints}
        given = {half.hint for half in HALF_RIGHT.values() if half.phase == phase}
        assert all(any(says.startswith(hint) for says in hints) for hint in given)
        assert len(given) >= 1


def test_a_package_that_cannot_be_imported_is_said(tmp_path: Path) -> None:
    exercise = load_exercise("7")
    tree = copy_of(exercise, tmp_path)
    (tree / exercise.package / "scheduler.py").write_text("def broken(:\n")
    judgement = judge(exercise, tree)
    assert judgement.broken.startswith("SyntaxError: ")
    assert "scheduler.py, line 1" in judgement.broken
    assert "cannot be imported" in report(exercise, judgement)


def test_a_loop_without_end_fails_its_test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutor.judging.TEST_TIMEOUT_S", 3)
    exercise = load_exercise("8")
    tree = copy_of(exercise, tmp_path)
    path = tree / exercise.package / "tree.py"
    text = path.read_text()
    old = "        blocks: list[int] = []\n        while self._unused"
    assert text.count(old) == 1
    path.write_text(text.replace(old, "        while count == 0:\n            pass\n" + old))
    judgement = judge(exercise, tree)
    assert any("Timeout" in why for why in judgement.failed.values())
    assert judgement.held
