"""What a cluster does that a server does not: several engines, one address."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import running
from tests.cluster.mortal import DEATH
from tests.server.support import ServerProcess, assert_error, eventually

PLACES = 4  # two replicas of one seat and one place in the queue
LONG = {"max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def death(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made, it ends the next engine that computes (`tests.cluster.mortal`)."""
    return tmp_path_factory.mktemp("death") / "now"


@pytest.fixture(scope="module")
def small(death: Path) -> Iterator[ServerProcess]:
    with running(
        "tests.cluster.mortal",
        *("--max-batch-size", "1", "--max-waiting-requests", "1"),
        env={DEATH: str(death)},
    ) as process:
        yield process


def replicas(server: ServerProcess) -> dict[str, dict[str, float]]:
    """Each replica's counters, by its name."""
    said = server.client.get("/telemetry").json()["replicas"]
    return {name: each["counters"] for name, each in said.items()}


def test_tokens_come_while_the_next_are_computed(server: ServerProcess) -> None:
    server.begin_test()
    tokens, lump = 900, 75
    with server.client.stream(
        "POST", "/v1/completions", json=server.body(max_tokens=tokens, ignore_eos=True, stream=True)
    ) as response:
        reads = response.iter_raw()
        assert b"event: token" in next(reads)
        with httpx.Client(base_url=server.url) as other:
            assert (
                other.get("/telemetry").json()["counters"]["requests_finished"]
                == server.counted["requests_finished"]
            )
        next(reads)  # what has come while the other was answered
        most = max(read.count(b"event: token") for read in reads)
    assert most < lump


def test_what_replicas_say_is_added_up(server: ServerProcess) -> None:
    said = server.client.get("/telemetry").json()
    assert len(said["replicas"]) == 2
    for name, count in said["counters"].items():
        assert count == pytest.approx(sum(each["counters"][name] for each in said["replicas"].values()))
    page = server.client.get("/metrics").text
    for name in said["replicas"]:
        assert (
            f'vllm:num_requests_running{{model_name="{server.model}",phase="phase8_prefix",replica="{name}"}}'
            in page
        )
    assert_error(server.client.get("/telemetry", params={"since_step": "x"}), 400, "since_step")


def test_equal_beginnings_go_to_the_replica_that_has_them(server: ServerProcess) -> None:
    prompts = [
        f"In the {place}, " + "there was once a friendly little fox. " * 12 for place in ("garden", "forest")
    ]
    for prompt in prompts * 4:
        answer = server.complete(prompt=prompt, max_tokens=2)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    before = server.counters()
    assert server.client.post("/reset_prefix_cache").json()["dropped_blocks"] > 0
    for prompt in prompts * 2:
        server.complete(prompt=prompt, max_tokens=2)
    after = server.counters()
    found = after["cached_tokens"] - before["cached_tokens"]
    assert found > 0.4 * (
        after["prompt_tokens"] - before["prompt_tokens"]
    )  # each second time, all but the end


def test_busy_is_said_only_when_all_are_and_who_leaves_makes_room(small: ServerProcess) -> None:
    small.begin_test()
    over = threading.Event()

    def hold() -> None:
        with small.streaming(**LONG) as events:
            for _ in events:
                if over.is_set():
                    return

    clients = [threading.Thread(target=hold, daemon=True) for _ in range(PLACES)]
    for client in clients:
        client.start()
    eventually(lambda: small.counters()["requests_added"] == PLACES)
    assert small.queue_room() == 0
    assert_error(small.post(), 503, code="queue_full")
    over.set()
    for client in clients:
        client.join()
    eventually(lambda: small.queue_room() == PLACES)
    assert small.counters()["requests_cancelled"] >= 2  # those that were being computed, at least
    assert small.complete()["usage"]["completion_tokens"] == 8


def test_an_engine_that_dies_is_replaced_and_its_request_is_answered_by_another(
    small: ServerProcess, death: Path
) -> None:
    before = set(replicas(small))
    death.touch()
    assert small.complete()["usage"]["completion_tokens"] == 8
    assert not death.exists()
    assert small.complete()["usage"]["completion_tokens"] == 8  # whether or not Serve knows of it yet
    eventually(lambda: len(replicas(small)) == 2 and len(set(replicas(small)) & before) == 1)
    for _ in range(4):
        assert small.complete()["usage"]["completion_tokens"] == 8
