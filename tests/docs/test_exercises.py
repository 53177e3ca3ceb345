"""The small exercises: each fails without a solution, and passes with it."""

from __future__ import annotations

import subprocess
import sys

from tests.docs.support import ROOT

EXERCISES = ROOT / "docs" / "exercises"
FILES = [str(path.relative_to(ROOT)) for path in sorted(EXERCISES.glob("*.py")) if path.stem != "conftest"]


def check(*options: str) -> str:
    """Run every exercise's check in one process. Returns pytest's output, a line for each test."""
    plain = ["-rA", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *plain, *options]
    done = subprocess.run([*command, *FILES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), (
        done.stdout[-3000:] + done.stderr[-3000:]
    )  # 1: tests ran, and some failed
    return done.stdout


def test_solutions_pass() -> None:
    said = check("--solution")
    assert len(FILES) >= 12
    for file in FILES:
        assert f"PASSED {file}" in said
    assert "FAILED" not in said
    assert "ERROR" not in said


def test_untouched_exercises_fail() -> None:
    said = check()
    for file in FILES:
        assert f"FAILED {file}" in said
    assert "ERROR" not in said  # only the body that the learner has to write is missing
