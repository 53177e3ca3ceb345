"""A cluster that grows when all its engines are busy, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import running
from tests.support.servers import ServerProcess, assert_error, eventually

pytestmark = pytest.mark.cluster


@pytest.fixture
def growing() -> Iterator[ServerProcess]:
    with running(
        "phase8_prefix", "--replicas", "1", "--max-replicas", "2", "--max-batch-size", "2"
    ) as process:
        yield process


def test_a_busy_replica_gets_company_and_a_signal_lets_streams_end(growing: ServerProcess) -> None:
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            with growing.streaming(max_tokens=500, ignore_eos=True) as events:
                for _ in events:
                    if over.is_set():
                        return

    clients = [threading.Thread(target=ask, daemon=True) for _ in range(6)]
    for client in clients:
        client.start()

    def replicas() -> set[str]:
        return set(growing.client.get("/telemetry").json()["replicas"])

    assert len(replicas()) == 1
    eventually(lambda: len(replicas()) == 2)
    over.set()
    for client in clients:
        client.join()
    assert growing.complete()["usage"]["completion_tokens"] == 8

    # At shutdown, running requests are finished and new ones refused.
    with growing.streaming(max_tokens=2000, ignore_eos=True) as events:
        next(events)
        growing.signal()
        eventually(lambda: "finishing what runs" in growing.log_text)
        eventually(lambda: growing.client.get("/ready").status_code == 503)
        health = growing.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "draining")
        assert growing.client.get("/metrics").status_code == 200
        assert_error(growing.post(), 503, code="shutting_down")
        *_, (name, _) = events
        assert name == "done"
    assert growing.wait() == 0
