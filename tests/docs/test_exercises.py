"""The small exercises: each fails without a solution, and passes with it."""

from __future__ import annotations

import pytest

from tests.docs.support import ROOT
from tests.support.forked import Forked

EXERCISES = ROOT / "docs" / "exercises"
FILES = [path for path in sorted(EXERCISES.glob("*.py")) if path.stem != "conftest"]


def check(*options: str) -> str:
    """Run every exercise's check in one process. Returns pytest's output, a line for each test."""
    plain = ["-rA", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code, said, log = Forked("pytest", [*plain, *options, *map(str, FILES)]).finish()
    assert code in (0, 1), said[-3000:] + log[-3000:]  # 1: tests ran, and some failed
    return said


@pytest.mark.slow
def test_solutions_pass() -> None:
    said = check("--solution")
    assert len(FILES) >= 12
    for file in FILES:
        assert f"PASSED {file.relative_to(ROOT)}" in said
    assert "FAILED" not in said
    assert "ERROR" not in said


@pytest.mark.slow
def test_untouched_exercises_fail() -> None:
    said = check()
    for file in FILES:
        assert f"FAILED {file.relative_to(ROOT)}" in said
    assert "ERROR" not in said  # only the body that the learner has to write is missing
