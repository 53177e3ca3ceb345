"""Judges a learner's package: runs the phase's tests with it in place of the real one, and reports the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import StartupError
from tutor import plugin
from tutor.exercise import ROOT, Exercise, Idea, sentence

TEST_TIMEOUT_S = 30  # for each test: an endless loop fails one test only
SHOWN = 4  # most tests of one idea in the report
LINE = 110


@dataclass(frozen=True, slots=True)
class Judgement:
    """The results of the tests.

    Attributes:
        held: names of tests that passed.
        failed: tests that failed, with the reason.
        unwritten: tests that called a method that is not written yet, with that method's task.
        broken: why the package cannot be imported; "" if it can.
    """

    held: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    unwritten: dict[str, str] = field(default_factory=dict)
    broken: str = ""

    @property
    def all_hold(self) -> bool:
        return not (self.failed or self.unwritten or self.broken)


def judge(exercise: Exercise, tree: Path | None = None) -> Judgement:
    """Run the tests of an exercise on a tree.

    Raises:
        StartupError: there is no tree, or the tests could not be run.
    """
    tree = exercise.tree if tree is None else tree
    if not (tree / exercise.package).is_dir():
        raise StartupError(
            f"there is no {exercise.package} in {tree}: make learn PHASE={exercise.number} sets it up"
        )
    tests = [test for idea in exercise.ideas for test in idea.tests]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=no",
            "-p",
            "tutor.plugin",
            "-p",
            "no:cacheprovider",
        ]
        command += [f"--timeout={TEST_TIMEOUT_S}", *dict.fromkeys(tests)]
        settings = {
            plugin.TREE: str(tree.resolve()),
            plugin.PACKAGE: exercise.package,
            plugin.RESULTS: str(results),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=False
        )
        found = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
    if plugin.BROKEN in found:
        return Judgement(broken=found[plugin.BROKEN])
    if set(tests) - found.keys():
        raise StartupError(f"the tests could not be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    by_outcome = {
        outcome: {name: each["why"] for name, each in found.items() if each["outcome"] == outcome}
        for outcome in ("held", "failed", "unwritten")
    }
    return Judgement(set(by_outcome["held"]), by_outcome["failed"], by_outcome["unwritten"])


def report(exercise: Exercise, judgement: Judgement) -> str:
    """Return a judgement as text for the learner."""
    return "\n".join(_lines(exercise, judgement))


def _lines(exercise: Exercise, judgement: Judgement) -> Iterator[str]:
    yield f"Phase {exercise.number}, {exercise.title.lower()}"
    yield ""
    if judgement.broken:
        yield f"Your {exercise.package} cannot be imported: {judgement.broken}"
        return
    width = max(len(idea.title) for idea in exercise.ideas) + 2
    for idea in exercise.ideas:
        yield from _of_idea(idea, judgement, width)
    if judgement.all_hold:
        yield ""
        yield f"All of it holds: what you have written is phase {exercise.number}."
    hint = hint_for(exercise, judgement)
    if hint:
        yield ""
        yield textwrap.fill(f"Hint: {hint}", LINE, subsequent_indent="  ")


def _of_idea(idea: Idea, judgement: Judgement, width: int) -> Iterator[str]:
    failed = [test for test in idea.tests if test in judgement.failed]
    owed = list(dict.fromkeys(judgement.unwritten[t] for t in idea.tests if t in judgement.unwritten))
    count = sum(test in judgement.held for test in idea.tests)
    if not failed and not owed:
        yield f"  {idea.title:<{width}}holds ({count} tests)"
        return
    state = f"{count} of {len(idea.tests)} tests hold" if count or failed else "not written yet"
    yield f"  {idea.title:<{width}}{state}"
    yield from _some("to be written", owed)
    yield from _some("does not hold", [f"{sentence(test)} ({judgement.failed[test]})" for test in failed])


def _some(what: str, lines: list[str]) -> Iterator[str]:
    for line in lines[:SHOWN]:
        yield _shortened(f"{what}: {line}", " " * 6)
    if len(lines) > SHOWN:
        yield f"      … and {len(lines) - SHOWN} more"


def hint_for(exercise: Exercise, judgement: Judgement) -> str:
    """Return the first hint that fits; "" if none does."""
    failed, held = (
        {test.rpartition("::")[2] for test in tests} for tests in (judgement.failed, judgement.held)
    )
    return next((hint.says for hint in exercise.hints if hint.fits(failed, held)), "")


def _shortened(line: str, indent: str) -> str:
    return indent + textwrap.shorten(line, LINE - len(indent), placeholder=" …")
