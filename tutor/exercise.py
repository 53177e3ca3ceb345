"""Reads a phase's exercise from `learn.toml` beside its tests."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import StartupError
from common.phases import find_phase

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
TREES = ROOT / "learn"  # git ignores it

_SECTION = re.compile(r"# -{20,} (.+)")


@dataclass(frozen=True, slots=True)
class Idea:
    """A part of a phase's idea.

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
        fails, holds: names of tests. The hint fits if all of `fails` fail and all of `holds` pass.
        says: the hint.
    """

    fails: frozenset[str]
    holds: frozenset[str]
    says: str

    def fits(self, failed: set[str], held: set[str]) -> bool:
        return self.fails <= failed and self.holds <= held


@dataclass(frozen=True, slots=True)
class Exercise:
    """The exercise of one phase.

    Attributes:
        number: the phase's number.
        package: the phase's module name.
        title: the phase's title.
        empty: methods to be emptied: `module.Class.method`, or `module.Class` for all but `__init__`.
        ideas: the parts that the report lists.
        hints: the hints. The report shows the first that fits.
    """

    number: int
    package: str
    title: str
    empty: tuple[str, ...]
    ideas: tuple[Idea, ...]
    hints: tuple[Hint, ...]

    @property
    def tree(self) -> Path:
        """The folder of the learner's copy."""
        return TREES / f"phase{self.number}"

    @property
    def source(self) -> Path:
        return ROOT / self.package


def load_exercise(phase: str) -> Exercise:
    """Return the exercise of a phase, given by number or name.

    Raises:
        StartupError: there is no such phase, or it has no exercise.
    """
    found = find_phase(phase).PHASE
    folder = TESTS / found.slug
    try:
        entries = tomllib.loads((folder / "learn.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(
            f"{found.slug} has no exercise here: {folder / 'learn.toml'} is missing; "
            "exercises need a checkout of the repository"
        ) from None
    return Exercise(
        number=found.number,
        package=found.slug,
        title=found.title,
        empty=tuple(entries["empty"]),
        ideas=tuple(_idea(folder, each) for each in entries["idea"]),
        hints=tuple(
            Hint(frozenset(each["fails"]), frozenset(each.get("holds", ())), each["says"])
            for each in entries.get("hint", ())
        ),
    )


def _idea(folder: Path, entry: dict[str, Any]) -> Idea:
    tests = [name for part in entry["tests"] for name in find_tests(folder, part)]
    return Idea(entry["title"], tuple(dict.fromkeys(tests)))


def find_tests(folder: Path, part: str) -> list[str]:
    """Return the tests of an entry: `test_x.py` is the whole file, `test_x.py::test_y` one test, and
    `test_x.py [heading]` the tests below that heading.

    Raises:
        ValueError: there are none.
    """
    match = re.fullmatch(r"(\S+\.py)(?:::(\w+)| \[(.+)\])?", part)
    if match is None:
        raise ValueError(
            f"{part!r} is neither a file of tests, nor one of its tests, nor one of its headings"
        )
    file, name, heading = match.groups()
    path = folder / file
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
