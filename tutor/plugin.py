"""A pytest plugin: puts the learner's package in place of the real one, and writes the results for the tutor."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TREE, PACKAGE, RESULTS = "TUTOR_TREE", "TUTOR_PACKAGE", "TUTOR_RESULTS"  # in the environment
BROKEN = ""  # key of the import error in the results: no test has this name

_results: dict[str, Any] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Import the learner's package before any test is read, so that every later import gets it."""
    sys.path.insert(0, os.environ[TREE])
    try:
        importlib.import_module(os.environ[PACKAGE])
    except Exception as error:  # whatever a learner's module raises
        _results[BROKEN] = f"{type(error).__name__}: {error}"
        _write()
        pytest.exit("the package cannot be imported", 3)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # One result for all parameters of a test: "unwritten" if any is, else the first failure.
    known = _results.setdefault(item.nodeid.partition("[")[0], {"outcome": "held", "why": ""})
    if report.failed and known["outcome"] != "unwritten":
        assert call.excinfo is not None
        error = call.excinfo.value
        if isinstance(error, NotImplementedError):
            known |= {"outcome": "unwritten", "why": str(error)}
        elif known["outcome"] == "held":
            known |= {"outcome": "failed", "why": _first_line(error)}
    return report


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or "an assertion does not hold"
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return kind + text.splitlines()[0]


def pytest_sessionfinish() -> None:
    _write()


def _write() -> None:
    Path(os.environ[RESULTS]).write_text(json.dumps(_results), encoding="utf-8")
