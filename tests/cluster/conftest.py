"""Clusters of two replicas, as processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.support import ServerProcess

HERE = Path(__file__).parent

#: What runs wherever tests run: without Ray.
WITHOUT_RAY = {"test_policy", "test_pieces", "test_command"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.path.stem not in WITHOUT_RAY:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def phase() -> str:
    return "phase8_prefix"


@pytest.fixture(scope="session")
def server(phase: str) -> Iterator[ServerProcess]:
    """A cluster that tests of the API take for a server. They leave it as they find it."""
    process = ServerProcess(phase, "--max-seq-len", "1024", module="tests.cluster.start")
    yield process
    assert process.process.poll() is None, f"the cluster did not outlive its tests:\n{process.log_text}"
    assert "Traceback" not in process.log_text
    process.signal()
    assert process.wait() == 0
    process.close()
