"""A pytest plugin: puts the learner's files in place of the project's, and writes the results for the tutor."""

from __future__ import annotations

import importlib
import json
import os
import textwrap
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tutor.overlay import ReturnedNoneError, in_words, install, place_in

if TYPE_CHECKING:  # a module that is imported before `install` cannot be replaced by the learner's
    from common.request import Request

TREE, RESULTS = "TUTOR_TREE", "TUTOR_RESULTS"  # names of environment variables
BROKEN = ""  # key of the import error in the results: no test has this name
VALUE = 300  # most characters that the report shows of a value
SHORT_TIMEOUT_S = 3  # for each test, once the learner's code has not returned in time
TESTS = Path(__file__).parents[1] / "tests"

_results: dict[str, Any] = {}
_compared: list[tuple[str, object, object]] = []  # what the running test's failed assertions compare
_raised: list[BaseException] = []  # errors raised in the tree, and caught by the engine, in this test


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Import the learner's modules before any test is read, so that every later import gets them."""
    import hypothesis  # both here, because `tutor.judging` imports this module in a process that needs neither
    import torch

    if not torch.cuda.is_available():  # as in tests/conftest.py, which pytest reads later
        os.environ.setdefault("TRITON_INTERPRET", "1")
    pytest.register_assert_rewrite("tests")  # so that helpers that fail show their values, too
    torch.testing.assert_close = _noting(torch.testing.assert_close)
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


class Furthest:
    """The element of a tensor that differs most from the element of another tensor at the same place."""

    def __init__(self, number: float, index: tuple[int, ...]) -> None:
        self.number = number
        self.index = index

    def __repr__(self) -> str:
        return f"{self.number:.7g} at {list(self.index)}, where the difference is largest"


def _noting(assert_close: Callable[..., None]) -> Callable[..., None]:
    """Return a version of `assert_close` that notes in `_compared` the two values of each comparison that fails."""

    def compare(actual: object, expected: object, *arguments: Any, **named: Any) -> None:
        try:
            assert_close(actual, expected, *arguments, **named)
        except AssertionError:
            _compared.append(("==", *_furthest(actual, expected)))
            raise

    return compare


def _furthest(actual: object, expected: object) -> tuple[object, object]:
    """Return the two values that the report shows for a failed comparison.

    For two tensors they are the elements that differ most, or the shapes if the shapes differ. Otherwise they are
    `actual` and `expected` themselves.
    """
    import torch

    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return actual, expected
    if actual.shape != expected.shape:
        return actual.shape, expected.shape
    difference = (actual.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
    index = tuple(int(each) for each in torch.unravel_index(difference.argmax(), difference.shape))
    return Furthest(actual[index].item(), index), float(f"{expected[index].item():.7g}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _compared.clear()
    _raised.clear()


def pytest_assertrepr_compare(op: str, left: object, right: object) -> None:
    """Note in `_compared` the two values of a failed assertion. Returns None: the assertion's own text stays."""
    _compared.append((op, left, right))


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
    that raised `error`, and the compared values or the error's message. Lines that do not apply are left out.
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
    elif _compared:
        op, left, right = _compared[-1]
        where, left, right = _first_difference(left, right)
        yield f"    got       {_shown(left)}{where}"
        yield f"    expected  {'' if op in ('==', 'is') else op + ' '}{_shown(right)}"
    else:
        yield from (f"    {line}" for line in str(error).splitlines()[:3] if line)


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, pytest.fail.Exception) and "pytest-timeout" in str(error)


def _said(error: BaseException) -> str:
    if _is_timeout(error):
        return "Timeout: the test did not end. A loop never ends, or a request makes no progress."
    return in_words(error)


def _first_difference(left: object, right: object) -> tuple[str, object, object]:
    """Return a note and two values to show, for two values that differ.

    If one of two lists is too long to be shown, the values are the first entries that differ, and the note has
    their index. If one list begins with the other, the values are the lengths. Otherwise the values are `left` and
    `right`, and the note is empty.
    """
    is_long = max(len(repr(left)), len(repr(right))) > VALUE
    if is_long and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        for i, (ours, theirs) in enumerate(zip(left, right, strict=False)):
            if ours != theirs:
                return f"   at index {i}, the first that differs", ours, theirs
        if left and right and len(left) != len(right):  # one begins like the other
            return " entries", len(left), len(right)
    return "", left, right


def _shown(value: object) -> str:
    return textwrap.shorten(repr(value), VALUE, placeholder=" …")


def _tree() -> Path:
    return Path(os.environ[TREE])


def pytest_sessionfinish() -> None:
    _write()


def _write() -> None:
    Path(os.environ[RESULTS]).write_text(json.dumps(_results), encoding="utf-8")
