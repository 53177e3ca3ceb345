"""Exercises: the bodies that are removed, the code that stays, the tests and hints, and the text of a judgement."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from common.startup.phases import phase_names, phase_number
from tests.docs.support import ROOT
from tutor import __main__ as command_line
from tutor import emptying
from tutor.emptying import empty, set_up
from tutor.exercise import Exercise, exercise_names, find_tests, load_exercise, sentence
from tutor.judging import Judgement, hint_for, report

NAMES = exercise_names()


def judged_by(exercise: Exercise) -> list[str]:
    return [test for idea in exercise.ideas for test in idea.tests]


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """Return a module's functions and methods, by name."""
    return dict(emptying._functions(ast.parse(path.read_text())))


def test_every_chapter_and_phase_has_one() -> None:
    assert ["1", "2", "3", *(str(phase_number(name)) for name in phase_names()), "kernel"] == NAMES
    assert [load_exercise(str(phase_number(name))).serves for name in phase_names()] == phase_names()


@pytest.mark.parametrize("name", NAMES)
def test_its_tests_and_hints_exist(name: str) -> None:
    exercise = load_exercise(name)
    assert len(exercise.ideas) >= 3
    names = Counter(test.rpartition("::")[2] for test in judged_by(exercise))
    assert set(names.values()) == {1}, "a test of two ideas, or two of one name"
    for hint in exercise.hints:
        assert hint.fails, hint.says
        assert hint.fails | hint.holds <= names.keys(), hint.says
    assert exercise.serves in phase_names()


@pytest.mark.parametrize("name", NAMES)
def test_signatures_and_docstrings_stay_and_so_do_all_other_bodies(name: str, tmp_path: Path) -> None:
    exercise = load_exercise(name)
    set_up(exercise, tmp_path / "tree")
    files = [path.relative_to(tmp_path / "tree").as_posix() for path in (tmp_path / "tree").rglob("*.py")]
    assert sorted(files) == sorted(exercise.empty)
    for file, emptied in exercise.empty.items():
        original, copied = functions(ROOT / file), functions(tmp_path / "tree" / file)
        assert copied.keys() == original.keys()
        for each, function in copied.items():
            assert ast.unparse(function.args) == ast.unparse(original[each].args)
            assert ast.get_docstring(function) == ast.get_docstring(original[each])
            if each not in emptied:
                assert ast.unparse(function) == ast.unparse(original[each])
                continue
            (*_, last) = function.body
            assert len(function.body) == 1 + (ast.get_docstring(function) is not None)
            assert isinstance(last, ast.Raise)
            assert f"{each}: " in ast.unparse(last)


def test_a_copy_is_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tutor.exercise.TREES", tmp_path)
    assert command_line.main(["learn", "7"]) == 0
    said = capsys.readouterr().out
    assert "phase7 is yours" in said
    assert "ChunkedScheduler.chunks" in said
    assert "make check PHASE=7" in said
    mine = tmp_path / "phase7" / "phase7_chunked" / "scheduler.py"
    mine.write_text("mine")
    assert command_line.main(["learn", "7"]) == 2
    assert "stays as it is" in capsys.readouterr().err
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("command", ["check", "serve", "compare", "step"])
def test_without_a_copy_every_command_says_how_to_make_one(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tutor.exercise.TREES", tmp_path)
    assert command_line.main([command, "8"]) == 2
    assert "make learn PHASE=8" in capsys.readouterr().err
    assert command_line.main([command, "12"]) == 2
    assert "no exercise '12'; there are 1, 2, 3, 4" in capsys.readouterr().err


# ---------------------------------------------------------------------- removing bodies

SOURCE = '''class A:
    def __init__(self) -> None:
        self.x = 1

    @property
    def one(self) -> int:
        """The first.

        And more of it.
        """
        # how
        return 1

    def two(
        self,
    ) -> int:
        """Two."""
        return 2

    # about three
    def three(self) -> int:
        """Three."""
        return 3


if A:

    def four() -> int:
        """Four."""
        return 4
'''


def test_bodies_are_removed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptying, "owed_words", lambda module, name, doc: 'it "owes" ' + "much " * 30)
    text = empty(SOURCE, "some.module", ["A.one", "A.two", "four"])
    assert "# how" not in text
    assert "And more of it." in text
    assert "# about three" in text
    namespace: dict[str, type] = {}
    exec(text, namespace)
    made = namespace["A"]()
    assert (made.x, made.three()) == (1, 3)
    for call in (lambda: made.one, made.two, namespace["four"]):
        with pytest.raises(NotImplementedError, match=r'it "owes" much much'):
            call()
    assert max(map(len, text.splitlines())) < 116


@pytest.mark.parametrize("name", ["A.five", "C", "A"])
def test_a_function_that_does_not_exist_cannot_be_emptied(name: str) -> None:
    with pytest.raises(ValueError, match=f"some.module has no {name}"):
        empty(SOURCE, "some.module", [name])


@pytest.mark.parametrize("part", ["test_x.py::test_other", "test_x.py [no heading]", "test_x", "test_x.py::"])
def test_an_entry_stands_for_tests(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutor.exercise.ROOT", tmp_path)
    rule = "# " + "-" * 70
    (tmp_path / "test_x.py").write_text(
        f"def test_a(): ...\n{rule} one\ndef test_b(): ...\ndef help(): ...\n{rule} two\ndef test_c(): ...\n"
    )
    assert find_tests(tmp_path, "test_x.py") == [f"test_x.py::test_{letter}" for letter in "abc"]
    assert find_tests(tmp_path, "test_x.py [one]") == ["test_x.py::test_b"]
    assert find_tests(tmp_path, "test_x.py::test_a") == ["test_x.py::test_a"]
    with pytest.raises(ValueError, match=r"stands for no test|is neither"):
        find_tests(tmp_path, part)


# ---------------------------------------------------------------------- the report


def test_a_judgement_in_words() -> None:
    exercise = load_exercise("6")
    tests = judged_by(exercise)
    everything = report(exercise, Judgement(held=set(tests)))
    assert everything.count("holds (") == len(exercise.ideas)
    assert everything.endswith("All of it holds. Serve it: make serve LEARN=6")

    hint = exercise.hints[-1]
    (wrong,) = [test for test in tests if test.rpartition("::")[2] in hint.fails]
    why = ["tests/x.py:7   assert one() == 2", "    assert 1 == 2"]
    half = Judgement(held=set(tests) - {wrong}, failed={wrong: why})
    said = report(exercise, half)
    assert f"does not hold: {sentence(wrong)}\n" in said
    assert all(f"\n          {line}\n" in said for line in why)
    assert said.count("holds (") == len(exercise.ideas) - 1
    assert hint_for(exercise, half) == hint.says
    assert hint.says in " ".join(said.split())

    earlier = dataclasses.replace(half, held=half.held - {tests[0]}, failed={**half.failed, tests[0]: why})
    assert hint_for(exercise, earlier) == "", "the hint explains a later test than the first that fails"

    error = dataclasses.replace(half, raised={wrong})
    assert hint_for(exercise, error) == "", "the error is the explanation"

    nothing = report(exercise, Judgement(unwritten=dict.fromkeys(tests, "A.b: Does this. (x.py:3)")))
    assert nothing.count("not written yet") == len(exercise.ideas)
    assert nothing.count("A.b: Does this. (x.py:3)") == 1
    assert nothing.count("not written yet, needs A.b") == len(exercise.ideas) - 1
    assert "Hint" not in nothing

    skipped = Judgement(skipped=dict.fromkeys(tests, "Skipped: could not import 'triton'"))
    assert report(exercise, skipped).count("not tested: Skipped: could not") == len(exercise.ideas)
    assert not skipped.all_hold

    broken = report(exercise, Judgement(broken="scheduler.py:3: SyntaxError: invalid syntax"))
    assert "It cannot be imported. scheduler.py:3: SyntaxError" in broken
    assert not Judgement(broken="it").all_hold


# ---------------------------------------------------------------------- a learner's files

PROGRAM = """
import logging, phase5_continuous.scheduler as mine, phase5_continuous.runner as theirs
logging.basicConfig()
print(mine.VALUE, theirs.ContinuousRunner.__name__)
try:
    mine.fail()
except ZeroDivisionError as error:
    logging.getLogger("engine").exception("caught")
    logging.getLogger("engine").warning("again: %r", error)
"""


#: A module whose functions all return None; only one of them may not.
FORGETFUL = """\
def may() -> "int | None": ...
def nothing() -> "None": ...
def free(): ...


class A:
    def plan(self) -> "int":
        42
"""


@pytest.mark.slow
def test_files_of_the_tree_are_imported_and_errors_point_to_them(tmp_path: Path) -> None:
    """Modules that the tree lacks come from the project. Errors that are logged in any way name file and line."""
    (tmp_path / "phase5_continuous").mkdir()
    (tmp_path / "phase5_continuous" / "scheduler.py").write_text(
        "from common.engine.scheduling import Scheduler as ContinuousScheduler\n"
        "VALUE = 7\n\n\ndef fail():\n    return 1 / 0\n"
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "tutor.overlay", str(tmp_path), "program"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "7 ContinuousRunner\n", done.stderr
    assert done.stderr.count("scheduler.py:6, in fail: ZeroDivisionError: division by zero\n") == 2
    assert done.stderr.count("    return 1 / 0\n") == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def broken(:\n", "program.py:1: SyntaxError: "),
        ("\nnothing\n", "program.py:2, in <module>: NameError"),
        (
            "import mine\n\nassert mine.may() is mine.nothing() is mine.free() is None\nmine.A().plan()\n",
            "mine.py:7, in plan: ReturnedNoneError: A.plan returned None, not int",
        ),
    ],
)
def test_a_file_that_cannot_be_run_is_named(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(text)
    (tmp_path / "mine.py").write_text(FORGETFUL)
    command = [sys.executable, "-m", "tutor.overlay", str(tmp_path), "program"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
