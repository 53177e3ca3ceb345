"""Fixtures of the API's tests. They run against phase 9, which has the features of the phases before it.

All phases have the same routes, and what differs between phases is tested at their engines. Tests that need another
phase start a server of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.support import BATCH, QUEUE, ServerProcess, called_from_python
from tests.support.browser import tab

__all__ = ["tab"]


@pytest.fixture(scope="session")
def phase() -> str:
    return "phase9_pipelined"


@pytest.fixture(scope="session")
def shared_server(phase: str) -> Iterator[ServerProcess]:
    with ServerProcess(phase, "--max-seq-len", "1024") as process:
        yield process
        assert process.process.poll() is None, f"the server did not outlive its tests:\n{process.log_text}"
        assert "Traceback" not in "".join(process.log)


@pytest.fixture
def server(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    """An ordinary server. After the test, it must serve the next request."""
    yield shared_server
    shared_server.assert_serves()


def start_gated(phase: str) -> ServerProcess:
    return ServerProcess(
        phase,
        *("--max-batch-size", str(BATCH), "--max-waiting-requests", str(QUEUE), "--send-timeout", "2"),
        *called_from_python(phase),
        module="tests.server.gated_server",
    )


@pytest.fixture(scope="session")
def shared_gated(phase: str) -> Iterator[ServerProcess]:
    with start_gated(phase) as process:
        yield process


@pytest.fixture
def gated(shared_gated: ServerProcess) -> Iterator[ServerProcess]:
    """A server whose forward passes the test can hold and break. After the test, it must serve the next request."""
    shared_gated.begin_test()
    yield shared_gated
    shared_gated.order("heal")
    shared_gated.order("open")
    shared_gated.assert_serves()


@pytest.fixture
def mortal(phase: str) -> Iterator[ServerProcess]:
    """A gated server for one test only, which may end it."""
    with start_gated(phase) as process:
        yield process
