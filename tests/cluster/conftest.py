"""Clusters of two replicas, as processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.support import ServerProcess

HERE = Path(__file__).parent

#: What runs wherever tests run: without Ray.
WITHOUT_RAY = {"test_policy", "test_pieces", "test_command"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.path.stem not in WITHOUT_RAY:
            item.add_marker(pytest.mark.cluster)


@contextmanager
def running(*arguments: Any, **options: Any) -> Iterator[ServerProcess]:
    """A cluster, which is taken down at the end whatever has happened: Ray's processes would stay."""
    process = ServerProcess(*arguments, module="tests.cluster.start", **({"env": {}} | options))
    try:
        yield process
    finally:
        process.signal()
        code = process.wait()
        process.close()
    assert code == 0


@pytest.fixture(scope="session")
def phase() -> str:
    return "phase8_prefix"


@pytest.fixture(scope="session")
def server(phase: str) -> Iterator[ServerProcess]:
    """A cluster that tests of the API take for a server. They leave it as they find it."""
    with running(phase, "--max-seq-len", "1024", "--max-batch-size", "32") as process:
        yield process
        assert process.process.poll() is None, f"the cluster did not outlive its tests:\n{process.log_text}"
        assert "Traceback" not in process.log_text
