"""Reads an exercise from `learn.toml` beside its tests."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import StartupError

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
TREES = ROOT / "learn"  # git ignores it

_SECTION = re.compile(r"# -{20,} (.+)")


@dataclass(frozen=True, slots=True)
class Idea:
    """One of the ideas that an exercise teaches, with the tests that check it.

    Attributes:
        title: its name in the report.
        tests: pytest's names of its tests, without parameters: `tests/…/test_x.py::test_y`.
    """

    title: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hint:
    """A hint for a solution that is half right.

    Attributes:
        fails, holds: names of test functions. The hint fits if all of `fails` fail, if all of `holds` pass, and if
            no test before the first of `fails` fails.
        says: the hint.
    """

    fails: frozenset[str]
    holds: frozenset[str]
    says: str

    def fits(self, failed: list[str], held: set[str]) -> bool:
        """Return whether the hint explains the first failed test.

        Args:
            failed: names of the test functions that failed, in the order of the exercise's ideas.
            held: names of the test functions that passed.
        """
        return failed[0] in self.fails and self.fails <= set(failed) and self.holds <= held


@dataclass(frozen=True, slots=True)
class Exercise:
    """One exercise.

    Attributes:
        name: the phase's number, or `kernel`.
        title: the phase's title.
        empty: the bodies to write: `function` or `Class.method`, by file.
        ideas: the parts that the report lists.
        hints: hints for wrong solutions. The report shows one at most (`tutor.judging.hint_for`).
        serves: the phase that runs the learner's code.
        environment: variables that the tests and the server need, so that the learner's code is what runs.
    """

    name: str
    title: str
    empty: Mapping[str, tuple[str, ...]]
    ideas: tuple[Idea, ...]
    hints: tuple[Hint, ...]
    serves: str
    environment: Mapping[str, str]

    @property
    def tree(self) -> Path:
        """The folder of the learner's copy."""
        return TREES / (f"phase{self.name}" if self.name.isdecimal() else self.name)

    def written_tree(self) -> Path:
        """Return the folder of the learner's copy. Raises StartupError if there is none."""
        if not self.tree.is_dir():
            raise StartupError(f"there is no {shown(self.tree)}: make learn PHASE={self.name} sets it up")
        return self.tree


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def exercise_names() -> list[str]:
    """Return the names of all exercises, phases first."""
    return sorted(_folders(), key=lambda name: (not name.isdecimal(), name.zfill(2)))


def _folders() -> dict[str, Path]:
    found = (path.parent for path in TESTS.glob("*/learn.toml"))
    return {folder.name.removeprefix("phase").partition("_")[0]: folder for folder in found}


def load_exercise(name: str) -> Exercise:
    """Return an exercise. Its name is the number of a phase, or `kernel`.

    Raises:
        StartupError: there is no such exercise.
    """
    folder = _folders().get(name)
    if folder is None:
        known = ", ".join(exercise_names()) or "none: exercises need a checkout of the repository"
        raise StartupError(f"no exercise {name!r}; there are {known}")
    entries = tomllib.loads((folder / "learn.toml").read_text(encoding="utf-8"))
    return Exercise(
        name=name,
        title=entries["title"],
        empty={file: tuple(names) for file, names in entries["empty"].items()},
        ideas=tuple(_idea(folder, each) for each in entries["idea"]),
        hints=tuple(
            Hint(frozenset(each["fails"]), frozenset(each.get("holds", ())), each["says"])
            for each in entries.get("hint", ())
        ),
        serves=entries.get("serves", folder.name),
        environment=entries.get("environment", {}),
    )


def _idea(folder: Path, entry: dict[str, Any]) -> Idea:
    tests = [name for part in entry["tests"] for name in find_tests(folder, part)]
    return Idea(entry["title"], tuple(dict.fromkeys(tests)))


def find_tests(folder: Path, part: str) -> list[str]:
    """Return the names of the tests that `part`, an entry of `learn.toml`, stands for.

    `test_x.py` stands for the whole file, `test_x.py::test_y` for one test, and `test_x.py [heading]` for the tests
    from that heading to the next. The file's path is relative to `folder`.

    Raises:
        ValueError: the entry has none of these forms, or there are no such tests.
    """
    match = re.fullmatch(r"(\S+\.py)(?:::(\w+)| \[(.+)\])?", part)
    if match is None:
        raise ValueError(
            f"{part!r} is neither a file of tests, nor one of its tests, nor one of its headings"
        )
    file, name, heading = match.groups()
    path = (folder / file).resolve()
    text = path.read_text(encoding="utf-8")
    sections = {i: found[1] for i, line in enumerate(text.splitlines(), 1) if (found := _SECTION.match(line))}
    tests = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            above = [line for line in sections if line < node.lineno]
            under = sections[above[-1]] if above else None
            if (name is None or node.name == name) and (heading is None or under == heading):
                tests.append(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    if not tests:
        raise ValueError(f"{part!r} stands for no test")
    return tests


def sentence(test: str) -> str:
    """Return a test's name as a sentence: `…::test_nobody_overtakes` is `nobody overtakes`."""
    return test.rpartition("::")[2].removeprefix("test_").replace("_", " ")
