"""The judge: the original passes, an emptied tree lists its missing bodies, half-right solutions get hints."""

from __future__ import annotations

import dataclasses
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tutor.forks import Forks
from tutor import judging
from tutor.emptying import set_up
from tutor.exercise import ROOT, Exercise, Idea, exercise_names, load_exercise
from tutor.judging import Judgement, hint_for, judge, report

NAMES = exercise_names()


#: Solutions with a mistake, by name.
SOLUTIONS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("half_right.toml").read_text())
HALF_RIGHT = {name: each for name, each in SOLUTIONS.items() if "hint" in each}
#: Solutions for which a hint would be wrong.
UNLIKE = {name: each for name, each in SOLUTIONS.items() if "not" in each}


@pytest.fixture(scope="module")
def pytest_is_forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with Forks(tmp_path_factory.mktemp("forks") / "output") as forks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "subprocess", forks)
        yield


def judged(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.usefixtures("pytest_is_forked")(test))


def copy_of(exercise: Exercise, tree: Path) -> Path:
    """Copy the project's own files of an exercise."""
    for file in exercise.empty:
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tree / file)
    return tree


def up_to_hint(exercise: Exercise, says: str) -> Exercise:
    """Return the exercise with only those tests that decide whether a hint is given.

    These are all tests up to the first that the hint explains, and the tests that the hint names. An earlier hint
    that explains the same first test would be given instead, so its tests are among them, too.

    Args:
        exercise: the whole exercise.
        says: how the hint begins.
    """
    place = next(i for i, hint in enumerate(exercise.hints) if hint.says.startswith(says))
    tests = [test for idea in exercise.ideas for test in idea.tests]
    names = [test.rpartition("::")[2] for test in tests]
    first = next(i for i, name in enumerate(names) if name in exercise.hints[place].fails)
    rivals = [hint for hint in exercise.hints[: place + 1] if names[first] in hint.fails]
    asked = set(names[:first]).union(*(hint.fails | hint.holds for hint in rivals))
    kept = tuple(test for test, name in zip(tests, names, strict=True) if name in asked)
    return dataclasses.replace(exercise, ideas=(Idea("all that decides the hint", kept),))


def half_right(half: dict[str, Any], text: str) -> str:
    """Make the changes of a half-right solution to the original file's text."""
    for change in half["changes"]:
        assert text.count(change["from"]) == 1, f"the original has changed: {change['from']!r}"
        text = text.replace(change["from"], change["to"])
    return text


def judged_up_to_hint(half: dict[str, Any], says: str, tree: Path) -> tuple[Exercise, Judgement]:
    """Write a half-right solution to `tree`, and run the tests that decide whether it gets a hint.

    Returns the whole exercise and the results.
    """
    exercise = load_exercise(half["exercise"])
    path = copy_of(exercise, tree) / half["file"]
    path.write_text(half_right(half, path.read_text()))
    judgement = judge(up_to_hint(exercise, says), tree)
    assert judgement.failed
    return exercise, judgement


@judged
@pytest.mark.parametrize("name", NAMES)
def test_the_original_holds(name: str, tmp_path: Path) -> None:
    exercise = load_exercise(name)
    judgement = judge(exercise, copy_of(exercise, tmp_path))
    assert judgement.all_hold, report(exercise, judgement)
    # Some tests need instructions for bfloat16. The report says which were skipped, and why.
    assert len(judgement.held) + len(judgement.skipped) == sum(len(idea.tests) for idea in exercise.ideas)


@judged
@pytest.mark.parametrize("name", NAMES)
def test_the_emptied_tree_says_what_it_owes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PYTEST_ADDOPTS", "--maxfail=1"
    )  # an option of the caller's pytest, which must not affect the judge's
    exercise = load_exercise(name)
    set_up(exercise, tmp_path / "tree")
    judgement = judge(exercise, tmp_path / "tree")
    methods = [method for each in exercise.empty.values() for method in each]
    assert judgement.unwritten
    assert all(why.partition(":")[0] in methods for why in judgement.unwritten.values())
    said = report(exercise, judgement)
    for idea in exercise.ideas:
        assert f"{idea.title} " in said
        judged = judgement.unwritten.keys() | judgement.skipped.keys()
        assert judged & set(idea.tests), f"{idea.title} judges nothing that was taken out"
    assert "to be written: " in said


@judged
@pytest.mark.parametrize("name", HALF_RIGHT)
def test_a_half_right_solution_gets_its_hint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutor.judging.TEST_TIMEOUT_S", 20)  # some of these solutions never end
    exercise, judgement = judged_up_to_hint(HALF_RIGHT[name], HALF_RIGHT[name]["hint"], tmp_path)
    said = hint_for(exercise, judgement)
    assert said.startswith(HALF_RIGHT[name]["hint"]), report(exercise, judgement)


@judged
@pytest.mark.parametrize("name", UNLIKE)
def test_another_mistake_does_not_get_the_hint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutor.judging.TEST_TIMEOUT_S", 20)
    exercise, judgement = judged_up_to_hint(UNLIKE[name], UNLIKE[name]["not"], tmp_path)
    assert not hint_for(exercise, judgement).startswith(UNLIKE[name]["not"]), report(exercise, judgement)


def test_every_hint_has_a_half_right_solution_that_fits_the_original() -> None:
    for name in NAMES:
        hints = [hint.says for hint in load_exercise(name).hints]
        given = [half["hint"] for half in HALF_RIGHT.values() if half["exercise"] == name]
        assert [sum(says.startswith(hint) for hint in given) for says in hints] == [1] * len(hints)
    for half in SOLUTIONS.values():
        half_right(half, (ROOT / half["file"]).read_text())


@judged
def test_a_package_that_cannot_be_imported_is_said(tmp_path: Path) -> None:
    exercise = load_exercise("7")
    tree = copy_of(exercise, tmp_path)
    (tree / "phase7_chunked" / "scheduler.py").write_text("def broken(:\n")
    judgement = judge(exercise, tree)
    assert "SyntaxError: " in judgement.broken
    assert "scheduler.py:1" in judgement.broken
    assert "cannot be imported" in report(exercise, judgement)


@judged
def test_a_loop_without_end_fails_its_test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutor.judging.TEST_TIMEOUT_S", 3)
    exercise = load_exercise("8")
    exercise = dataclasses.replace(exercise, ideas=exercise.ideas[:1])
    tree = copy_of(exercise, tmp_path)
    path = tree / "phase8_prefix" / "tree.py"
    text = path.read_text()
    old = "        blocks: list[int] = []\n        while self._unused"
    assert text.count(old) == 1
    path.write_text(text.replace(old, "        while count == 0:\n            pass\n" + old))
    judgement = judge(exercise, tree)
    assert any("Timeout" in " ".join(why) for why in judgement.failed.values())
    assert judgement.held
