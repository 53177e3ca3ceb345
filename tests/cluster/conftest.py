"""Clusters of two replicas, as processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.servers import ServerProcess


@contextmanager
def running(phase: str, *flags: Any, **options: Any) -> Iterator[ServerProcess]:
    """Run a cluster, and always take it down at the end, because Ray's processes would stay."""
    command = (sys.executable, "-m", "tests.cluster.start", phase)
    process = ServerProcess(phase, *flags, command=command, **options)
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
def shared_server(phase: str) -> Iterator[ServerProcess]:
    """A cluster in place of the server of the API's tests, which leave it unchanged."""
    with running(phase, "--max-seq-len", "1024", "--max-batch-size", "32") as process:
        yield process
        assert process.process.poll() is None, f"the cluster did not outlive its tests:\n{process.log_text}"
        assert "Traceback" not in process.log_text


@pytest.fixture
def server(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    yield shared_server
    shared_server.assert_serves()
