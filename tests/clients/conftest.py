"""Fixtures for real clients of our servers: the servers, and the table of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import MeasuredTable
from common.startup.phases import find_phase
from tests.clients.support import KEY, MODEL, PHASES
from tests.support.servers import ServerProcess


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clients-table", metavar="FOLDER", type=Path, help="results: write the table there")


#: Most seconds of one test: the first one that needs a client also downloads and installs it.
TIMEOUT_S = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("clients") is not None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


# ---------------------------------------------------------------------- servers and clients


@pytest.fixture(scope="session", params=PHASES)
def phase(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="session")
def server(phase: int) -> Iterator[ServerProcess]:
    """A server that requires a key, so that every tool must send one."""
    with ServerProcess(
        find_phase(phase).__name__,
        *("--model", MODEL, "--max-seq-len", "4096", "--api-key", KEY),
        headers={"Authorization": f"Bearer {KEY}"},
    ) as process:
        yield process
        assert process.process.poll() is None, f"the server did not outlive its clients:\n{process.log_text}"
        assert "Traceback" not in process.log_text


@pytest.fixture
def tool(request: pytest.FixtureRequest) -> Any:
    """The client that a test runs: the module's, `TOOL`, unless the module has several."""
    return request.module.TOOL


@pytest.fixture
def what(request: pytest.FixtureRequest) -> str:
    """What the test runs, for the table: the first line of its docstring."""
    return (request.function.__doc__ or "").strip().partition("\n")[0].rstrip(".")


# ---------------------------------------------------------------------- the table


@pytest.fixture(autouse=True)
def _noted(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Record a test's cells of the table as a property, which reaches the main process of pytest-xdist, too."""
    if "phase" in request.fixturenames:
        tool = request.getfixturevalue("tool")
        cells = [tool.title, tool.version, request.getfixturevalue("what"), request.getfixturevalue("phase")]
        record_property("client", cells)


class Results:
    """Collects the outcomes of each client's tests."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str], dict[int, set[str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        noted: dict[str, Any] = dict(report.user_properties)
        if "client" not in noted or (report.when != "call" and report.outcome == "passed"):
            return
        title, version, what, phase = noted["client"]
        result: str = report.outcome
        if hasattr(report, "wasxfail"):
            result = f"not yet: {report.wasxfail}"
        elif report.skipped and isinstance(report.longrepr, tuple):
            result = report.longrepr[2].replace("Skipped", "skipped", 1)
        self.rows.setdefault((title, version, what), {}).setdefault(phase, set()).add(result)

    def table(self) -> MeasuredTable:
        return MeasuredTable(
            name="clients",
            title="Clients",
            setup={"model": f"`{MODEL}`", "device": "cpu", "computed in": "float32", "key": "wanted"},
            columns=["client", "version", "what was run", "phases", "result"],
            rows=[
                [title, version, what, ", ".join(map(str, sorted(found))), outcome(found)]
                for (title, version, what), found in sorted(self.rows.items())
            ],
        )


def outcome(found: dict[int, set[str]]) -> str:
    """Return the common result of all phases, or each phase's result."""
    results = {phase: "; ".join(sorted(said - {"passed"})) or "passed" for phase, said in found.items()}
    if len(set(results.values())) == 1:
        return next(iter(results.values()))
    return "; ".join(f"{phase}: {result}" for phase, result in sorted(results.items()))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--clients-table", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(), "client-results")


def pytest_sessionfinish(session: pytest.Session) -> None:
    results = session.config.pluginmanager.get_plugin("client-results")
    if results is not None and results.rows:
        results.table().save(session.config.getoption("--clients-table"))
