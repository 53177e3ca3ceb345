"""A pytest plugin: puts the learner's files in place of the project's, and writes the results for the tutor."""

from __future__ import annotations

import importlib
import json
import os
import textwrap
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tutor.overlay import ReturnedNoneError, in_words, install, place_in

if TYPE_CHECKING:  # a module that is imported before `install` cannot be replaced by the learner's
    from common.request import Request

TREE, RESULTS = "TUTOR_TREE", "TUTOR_RESULTS"  # names of environment variables
BROKEN = ""  # key of the import error in the results: no test has this name
WIDTH, MOST_LINES = 300, 4  # most characters of a line of a failed assertion, and most of its lines
SHORT_TIMEOUT_S = 3  # for each test, once the learner's code has not returned in time
TESTS = Path(__file__).parents[1] / "tests"

_results: dict[str, Any] = {}
_raised: list[BaseException] = []  # errors raised in the tree, and caught by the engine, in this test


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Import the learner's modules before any test is read, so that every later import gets them."""
    import hypothesis  # both here, because `tutor.judging` imports this module in a process that needs neither
    import torch

    if not torch.cuda.is_available():  # as in tests/conftest.py, which pytest reads later
        os.environ.setdefault("TRITON_INTERPRET", "1")
    pytest.register_assert_rewrite("tests")  # so that helpers that fail show their values, too
    # A failing example is not made smaller: that takes longer than a test may run.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("tutor", phases=phases, derandomize=True, database=None)
    hypothesis.settings.load_profile("tutor")
    tree = Path(os.environ[TREE])
    install(tree, _note)
    try:
        for path in sorted(tree.rglob("*.py")):
            importlib.import_module(".".join(path.relative_to(tree).with_suffix("").parts))
        from common.request import Request

        # All fields of a request are thousands of characters, which would hide the difference of two values.
        Request.__repr__ = _request_id  # type: ignore[assignment, method-assign]
    except Exception as error:  # whatever a learner's module raises
        place = place_in(tree, error)
        _results[BROKEN] = f"{place}: {in_words(error)}" if place else in_words(error)
        _write()
        pytest.exit("a module cannot be imported", 3)


def _request_id(request: Request) -> str:
    return request.request_id


def _note(error: BaseException) -> None:
    """Add an error that the engine caught to `_raised`, unless a test raised it on purpose."""
    if not _raised_by_a_test(error):
        _raised.append(error)


def _raised_by_a_test(error: BaseException) -> bool:
    """Return whether the error's first cause was raised by a test's code, not by the learner's."""
    if isinstance(error, ReturnedNoneError):
        return False
    while error.__cause__ is not None:
        error = error.__cause__
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    known = [file for file in files if file.is_relative_to(TESTS) or file.is_relative_to(_tree())]
    return bool(known) and known[-1].is_relative_to(TESTS)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _raised.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.excinfo is not None:
        _leave_out_frames_without_lines(call.excinfo)
    report = yield
    # One result for all parameters of a test: "unwritten" if any is, else the first failure; "held" if any ran.
    known = _results.setdefault(item.nodeid.partition("[")[0], {"outcome": "skipped", "why": []})
    if report.skipped and known["outcome"] == "skipped":
        known["why"] = [str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)]
    elif report.passed and report.when == "call" and known["outcome"] == "skipped":
        known |= {"outcome": "held", "why": []}
    elif report.failed and known["outcome"] != "unwritten":
        assert call.excinfo is not None
        error = call.excinfo.value
        while isinstance(error, BaseExceptionGroup):  # Hypothesis found several
            error = error.exceptions[0]
        # An error that the engine caught is the cause of the assertion that fails afterwards.
        cause = _raised[0] if _raised and place_in(_tree(), error) is None else error
        # Triton's interpreter raises its own error, whose cause is the learner's.
        while cause.__cause__ is not None and place_in(_tree(), cause.__cause__):
            cause = cause.__cause__
        place = place_in(_tree(), cause)
        # Often the interrupted line is in a test: a scheduler that plans no progress lets the test step for ever.
        if _is_timeout(error):
            for each in item.session.items:
                each.add_marker(pytest.mark.timeout(SHORT_TIMEOUT_S))
        if isinstance(cause, NotImplementedError):
            known |= {
                "outcome": "unwritten",
                "why": [f"{cause} ({place.file_and_line if place else 'not in your files'})"],
            }
        elif known["outcome"] != "failed":
            raised = place is not None and not _is_timeout(error) and not _raised_by_a_test(cause)
            known |= {"outcome": "failed", "why": list(_lines(item, error, cause)), "raised": raised}
    return report


def _leave_out_frames_without_lines(found: pytest.ExceptionInfo[BaseException]) -> None:
    """Remove the traceback's frames without a line number, which end pytest with an internal error.

    A timeout may interrupt an endless loop at an instruction that belongs to no line of its source.
    """
    found.traceback = found.traceback.filter(lambda entry: entry._rawentry.tb_lineno is not None)


def _lines(item: pytest.Item, error: BaseException, cause: BaseException) -> Generator[str]:
    """Yield the lines that explain a failed test.

    They are the place in the learner's code that raised `cause`, the place in the test (and in a helper of tests)
    that raised `error`, and the assertion's or the error's message. Lines that do not apply are left out.
    """
    if place := place_in(_tree(), cause):
        yield f"{place}   {place.code}"
        yield f"    {_said(cause)}"
    if test := place_in(item.path, error):
        parameters = getattr(item, "callspec", None)
        with_ = f"   with [{parameters.id}]" if parameters else ""
        yield f"{test.file_and_line}   {test.code}{with_}"
    helper = place_in(TESTS, error) if isinstance(error, AssertionError) else None
    if helper and helper.file != str(item.path):
        yield f"{helper.file_and_line}   {helper.code}"
    if not isinstance(error, AssertionError):
        if not place:
            yield f"    {_said(error)}"
    else:  # pytest's own words: the compared values, and where they first differ
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and "Use -v" not in line]
        yield from (f"    {textwrap.shorten(line, WIDTH, placeholder=' …')}" for line in lines[:MOST_LINES])


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, pytest.fail.Exception) and "pytest-timeout" in str(error)


def _said(error: BaseException) -> str:
    if _is_timeout(error):
        return "Timeout: the test did not end. A loop never ends, or a request makes no progress."
    return in_words(error)


def _tree() -> Path:
    return Path(os.environ[TREE])


def pytest_sessionfinish() -> None:
    _write()


def _write() -> None:
    Path(os.environ[RESULTS]).write_text(json.dumps(_results), encoding="utf-8")
