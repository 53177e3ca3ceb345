"""Exercises: what is taken out and what stays, that tests and hints exist, and how a judgement reads."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from common.phases import phase_names
from tests.docs.support import ROOT
from tutor import __main__ as command_line
from tutor import emptying
from tutor.emptying import empty, set_up
from tutor.exercise import Exercise, find_tests, load_exercise, sentence
from tutor.judging import Judgement, hint_for, report

PHASES = phase_names()


def judged_by(exercise: Exercise) -> list[str]:
    return [test for idea in exercise.ideas for test in idea.tests]


def signatures(path: Path) -> dict[str, tuple[str, str | None]]:
    """Every method's signature and docstring."""
    return {
        f"{owner.name}.{method.name}": (
            ast.unparse(method.args),
            ast.get_docstring(method),
        )
        for owner in ast.parse(path.read_text()).body
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef)
    }


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_one_whose_tests_and_hints_exist(phase: str) -> None:
    exercise = load_exercise(phase)
    tests = judged_by(exercise)
    assert len(exercise.ideas) >= 3
    assert all(idea.tests for idea in exercise.ideas)
    names = Counter(test.rpartition("::")[2] for test in tests)
    assert set(names.values()) == {1}, "a test of two ideas, or two of one name"
    assert exercise.hints
    for hint in exercise.hints:
        assert hint.fails, hint.says
        assert hint.fails | hint.holds <= names.keys(), hint.says
        assert hint.says.endswith(".")
    assert all(Path(ROOT, test.partition("::")[0]).is_file() for test in tests)


@pytest.mark.parametrize("phase", PHASES)
def test_signatures_and_docstrings_stay_and_the_rest_of_the_phase_does(phase: str, tmp_path: Path) -> None:
    exercise = load_exercise(phase)
    taken = set_up(exercise, tmp_path / "tree")
    copies = sorted((tmp_path / "tree" / phase).rglob("*.py"))
    assert [copy.name for copy in copies] == sorted(path.name for path in exercise.source.rglob("*.py"))
    for copy in copies:
        original = exercise.source / copy.name
        emptied = taken.get(f"{phase}/{copy.name}", [])
        assert (copy.read_text() == original.read_text()) == (emptied == [])
        assert signatures(copy) == signatures(original)
        for owner in ast.parse(copy.read_text()).body:
            for method in owner.body if isinstance(owner, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and f"{owner.name}.{method.name}" in emptied:
                    (*_, last) = method.body
                    assert len(method.body) == 1 + (ast.get_docstring(method) is not None)
                    assert isinstance(last, ast.Raise)
                    words = ast.unparse(last)
                    assert f"{owner.name}.{method.name}: " in words
                    assert "look where it is called" not in words, "nothing says what it owes"
    assert sum(map(len, taken.values())) >= 4


def test_what_there_is_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tutor.exercise.TREES", tmp_path)
    monkeypatch.setattr("tutor.__main__.ROOT", tmp_path)
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
    assert command_line.main(["check", "8"]) == 2
    assert "make learn PHASE=8" in capsys.readouterr().err
    assert command_line.main(["learn", "3"]) == 2
    assert "no phase '3'" in capsys.readouterr().err


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
        return 2

    # about three
    def three(self) -> None:
        """Nothing to do."""


class B:
    def four(self) -> int:
        """Four."""
        return 4
'''


def test_bodies_are_taken_out_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptying, "owed_words", lambda module, name: 'it "owes" ' + "much " * 30)
    text, methods = empty(SOURCE, "some.module", ["A"])
    assert methods == ["A.one", "A.two"]
    assert "# how" not in text
    assert "And more of it." in text
    assert "self.x = 1" in text
    assert "# about three" in text
    assert "return 4" in text
    namespace: dict[str, type] = {}
    exec(text, namespace)
    with pytest.raises(NotImplementedError, match=r'^A.two: it "owes" much much'):
        namespace["A"]().two()
    assert namespace["A"]().three() is None
    assert max(map(len, text.splitlines())) < 116


@pytest.mark.parametrize("name", ["A.five", "C", "A.three"])
def test_what_has_no_body_cannot_be_taken_out(name: str) -> None:
    with pytest.raises(ValueError, match=f"no body to take out of {name}"):
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


def test_a_judgement_in_words() -> None:
    exercise = load_exercise("6")
    tests = judged_by(exercise)
    everything = report(exercise, Judgement(held=set(tests)))
    assert everything.count("holds (") == len(exercise.ideas)
    assert everything.endswith("All of it holds: what you have written is phase 6.")

    hint = exercise.hints[-1]
    (wrong,) = [test for test in tests if test.rpartition("::")[2] in hint.fails]
    half = Judgement(held=set(tests) - {wrong}, failed={wrong: "assert 1 == 2"})
    said = report(exercise, half)
    assert f"does not hold: {sentence(wrong)} (assert" in said
    assert said.count("holds (") == len(exercise.ideas) - 1
    assert hint_for(exercise, half) == hint.says
    assert hint.says in " ".join(said.split())

    nothing = report(exercise, Judgement(unwritten=dict.fromkeys(tests, "A.b: Does this.")))
    assert nothing.count("not written yet") == nothing.count("A.b: Does this.") == len(exercise.ideas)
    assert "Hint" not in nothing

    broken = report(exercise, Judgement(broken="SyntaxError: invalid syntax (scheduler.py, line 3)"))
    assert "Your phase6_paged cannot be imported: SyntaxError" in broken
    assert not Judgement(broken="it").all_hold
