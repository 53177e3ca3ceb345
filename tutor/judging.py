"""Judges a learner's files: runs an exercise's tests with them in place of the project's. Reports the results."""

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
from tutor.exercise import ROOT, Exercise, Idea, sentence, shown

TEST_TIMEOUT_S = 30  # for each test: an endless loop fails one test only
SHOWN = 3  # most failed tests of one idea in the report
LINE = 110


@dataclass(frozen=True, slots=True)
class Judgement:
    """The results of the tests.

    Attributes:
        held: names of tests that passed.
        failed: tests that failed. The lines say where, and what was got and expected.
        unwritten: tests that called a function that is not written yet, with the function's task, file and line.
        skipped: tests that cannot run on this machine, with the reason.
        broken: why the learner's files cannot be imported; "" if they can.
        raised: failed tests in which the learner's code raised an error.
    """

    held: set[str] = field(default_factory=set)
    failed: dict[str, list[str]] = field(default_factory=dict)
    unwritten: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    broken: str = ""
    raised: set[str] = field(default_factory=set)

    @property
    def all_hold(self) -> bool:
        return bool(self.held) and not (self.failed or self.unwritten or self.broken)


def judge(exercise: Exercise, tree: Path | None = None) -> Judgement:
    """Run the tests of an exercise on the learner's copy, or on the folder `tree` if it is given.

    Raises:
        StartupError: there is no copy, or the tests could not be run.
    """
    tree = exercise.written_tree() if tree is None else tree
    tests = [test for idea in exercise.ideas for test in idea.tests]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "tutor.plugin"]
        command += ["-p", "no:schemathesis"]  # whose import takes a second
        command += ["-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}", *dict.fromkeys(tests)]
        settings = {plugin.TREE: str(tree.resolve()), plugin.RESULTS: str(results), "OMP_NUM_THREADS": "1"}
        settings |= exercise.environment
        # Options that are meant for another run might end this one at its first failure.
        own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        done = subprocess.run(
            command, cwd=ROOT, env=own | settings, capture_output=True, text=True, check=False
        )
        found = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
    if plugin.BROKEN in found:
        return Judgement(broken=found[plugin.BROKEN])
    if set(tests) - found.keys():
        raise StartupError(f"the tests could not be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    why: dict[str, dict[str, list[str]]] = {"held": {}, "failed": {}, "unwritten": {}, "skipped": {}}
    for name, each in found.items():
        why[each["outcome"]][name] = each["why"]
    unwritten, skipped = (
        {name: each[0] for name, each in why[kind].items()} for kind in ("unwritten", "skipped")
    )
    raised = {name for name, each in found.items() if each.get("raised")}
    return Judgement(set(why["held"]), why["failed"], unwritten, skipped, raised=raised)


def report(exercise: Exercise, judgement: Judgement) -> str:
    """Return a judgement as text for the learner."""
    return "\n".join(_lines(exercise, judgement))


def _lines(exercise: Exercise, judgement: Judgement) -> Iterator[str]:
    yield f"{in_words(exercise)}"
    yield ""
    if judgement.broken:
        yield f"It cannot be imported. {judgement.broken}"
        return
    width = max(len(idea.title) for idea in exercise.ideas) + 2
    seen: set[str] = set()
    for idea in exercise.ideas:
        yield from _of_idea(idea, judgement, width, seen)
    yield ""
    if judgement.all_hold:
        tested = all(judgement.held.intersection(idea.tests) for idea in exercise.ideas)
        said = "All of it holds." if tested else "All that could be tested holds."
        yield f"{said} Serve it: make serve LEARN={exercise.name}"
    elif hint := hint_for(exercise, judgement):
        yield textwrap.fill(f"Hint: {hint}", LINE, subsequent_indent="  ")


def in_words(exercise: Exercise) -> str:
    """Return the title of the report: the exercise's name and the folder of the learner's copy."""
    name = f"Phase {exercise.name}" if exercise.name.isdecimal() else exercise.name.capitalize()
    return f"{name}, {exercise.title}, as written in {shown(exercise.tree)}"


def _of_idea(idea: Idea, judgement: Judgement, width: int, seen: set[str]) -> Iterator[str]:
    """Yield the report's lines about one idea.

    `seen` holds the tasks of unwritten functions that the report has listed. Of these functions, only the names are
    given. The tasks that this idea lists are added to `seen`.
    """
    failed = [test for test in idea.tests if test in judgement.failed]
    owed = list(dict.fromkeys(judgement.unwritten[t] for t in idea.tests if t in judgement.unwritten))
    count = sum(test in judgement.held for test in idea.tests)
    if not count and (
        reasons := [judgement.skipped[test] for test in idea.tests if test in judgement.skipped]
    ):
        yield f"  {idea.title:<{width}}not tested: {reasons[0]}"
        return
    if not failed and not owed:
        yield f"  {idea.title:<{width}}holds ({count} {'test' if count == 1 else 'tests'})"
        return
    state = f"{count} of {len(idea.tests)} tests hold" if count or failed else "not written yet"
    names = ", ".join(words.partition(":")[0] for words in owed if words in seen)
    yield f"  {idea.title:<{width}}{state}" + (f", needs {names}" if names else "")
    for words in owed:
        if words not in seen:
            yield textwrap.fill(
                words, LINE, initial_indent="      to be written: ", subsequent_indent=" " * 10
            )
    seen.update(owed)
    for test in failed[:SHOWN]:
        yield f"      does not hold: {sentence(test)}"
        yield from (f"          {line}" for line in judgement.failed[test])
    if len(failed) > SHOWN:
        yield f"      … and {len(failed) - SHOWN} more"


def hint_for(exercise: Exercise, judgement: Judgement) -> str:
    """Return the first hint that fits; "" if none does.

    A hint explains the first failed test of the report. A mistake often makes tests of later ideas fail, too, so a
    hint for a later test would point away from the mistake.

    If the learner's code raised an error in each of the tests in a hint's `fails`, the errors explain that, and the
    hint is left out.
    """
    tests = [test for idea in exercise.ideas for test in idea.tests]
    failed = [_function(test) for test in tests if test in judgement.failed]
    held, raised = (set(map(_function, each)) for each in (judgement.held, judgement.raised))
    if not failed:
        return ""
    fitting = (each for each in exercise.hints if each.fits(failed, held) and not each.fails <= raised)
    return next((hint.says for hint in fitting), "")


def _function(test: str) -> str:
    """Return the name of a test's function: `test_y` of `tests/…/test_x.py::test_y`."""
    return test.rpartition("::")[2]
