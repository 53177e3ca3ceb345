"""`--solution` judges the reference solutions instead of what stands in this folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

SOLUTIONS = Path(__file__).resolve().parent / "solutions"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--solution", action="store_true", help="judge the reference solutions")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--solution"):
        # Imported first, under the names that the checks import: theirs are found then, not the learner's.
        sys.path.insert(0, str(SOLUTIONS))
        for path in sorted(SOLUTIONS.glob("*.py")):
            importlib.import_module(path.stem)
