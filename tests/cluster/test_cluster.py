"""A cluster's own behaviour: several engines behind one address."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.conftest import running
from tests.cluster.mortal import DEATH
from tests.support.servers import HANG_S, ServerProcess, assert_error, eventually

pytestmark = pytest.mark.cluster

PLACES = 4  # two replicas of one seat and one place in the queue
KEY = "a-key"
LONG = {"max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def death(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a file. If a test creates it, the next engine that computes dies (`tests.cluster.mortal`)."""
    return tmp_path_factory.mktemp("death") / "now"


@pytest.fixture(scope="module")
def small(death: Path) -> Iterator[ServerProcess]:
    with running(
        "tests.cluster.mortal",
        *("--max-batch-size", "1", "--max-waiting-requests", "1", "--body-timeout", "2"),
        env={DEATH: str(death), "INFER_API_KEY": KEY},
        headers={"Authorization": f"Bearer {KEY}"},
    ) as process:
        yield process


def replicas(server: ServerProcess) -> dict[str, dict[str, float]]:
    """Return each replica's counters, by its name."""
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
        with httpx.Client(base_url=server.url, timeout=HANG_S) as other:
            assert (
                other.get("/telemetry").json()["counters"]["requests_finished"]
                == server.counted["requests_finished"]
            )
        next(reads)  # tokens that came while the other client was answered
        most = max(read.count(b"event: token") for read in reads)
    assert most < lump


def test_equal_beginnings_go_to_the_replica_that_has_them(server: ServerProcess) -> None:
    prompts = [
        f"In the {place}, " + "there was once a friendly little fox. " * 12 for place in ("garden", "forest")
    ]
    for prompt in prompts * 4:
        answer = server.complete(prompt=prompt, max_tokens=2)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    before = server.counters()
    assert server.client.post("/reset_prefix_cache", json={}).json()["dropped_blocks"] > 0
    for prompt in prompts * 2:
        server.complete(prompt=prompt, max_tokens=2)
    after = server.counters()
    found = after["cached_tokens"] - before["cached_tokens"]
    assert found > 0.4 * (
        after["prompt_tokens"] - before["prompt_tokens"]
    )  # of every second request, all but the end is a hit


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
    assert small.counters()["requests_cancelled"] >= 2  # at least those that had a seat
    assert small.complete()["usage"]["completion_tokens"] == 8


def test_a_client_that_leaves_before_its_answer_makes_room(small: ServerProcess) -> None:
    small.begin_test()
    cancelled = small.counters()["requests_cancelled"]
    with pytest.raises(httpx.ReadTimeout):
        small.client.post("/v1/completions", json=small.body(**LONG, stream=False), timeout=1)
    eventually(lambda: small.counters()["requests_cancelled"] == cancelled + 1)
    eventually(lambda: small.queue_room() == PLACES)


def half_a_request(server: ServerProcess, *headers: str) -> socket.socket:
    """Return a connection after sending the head of a completion request on it, but no body."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S)
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Content-Length: 99",
    ]
    connection.sendall("\r\n".join([*lines, *headers, "", ""]).encode())
    return connection


def first_answer(connection: socket.socket) -> bytes:
    said = b""
    while b'"code":' not in said:
        said += connection.recv(4096)
    return said


def test_a_body_that_does_not_come_is_not_waited_for(small: ServerProcess) -> None:
    with half_a_request(small, f"Authorization: Bearer {KEY}") as connection:
        said = first_answer(connection)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"body_timeout" in said
    assert small.complete()["usage"]["completion_tokens"] == 8


def test_keys_are_looked_at_before_a_body(small: ServerProcess) -> None:
    with half_a_request(small) as connection:
        said = first_answer(connection)
    assert said.startswith(b"HTTP/1.1 401 ")
    assert b"www-authenticate: bearer" in said.lower()
    assert httpx.get(f"{small.url}/health", timeout=HANG_S).status_code == 200  # needs no key
    assert small.complete()["usage"]["completion_tokens"] == 8


class Watcher(threading.Thread):
    """Reads /health and /metrics of a cluster all the time."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.health: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self.over = False
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=HANG_S) as client:
            while not self.over:
                for path in ("/health", "/metrics"):
                    response = client.get(path)
                    if response.status_code != 200:
                        self.refused.append(f"{path}: {response.status_code} {response.text}")
                    elif path == "/health":
                        self.health.append(response.json())

    def states(self, status: str) -> list[dict[str, str]]:
        """Return the replicas' states from every answer with this status of the cluster."""
        return [each["replicas"] for each in self.health if each["status"] == status]


@pytest.fixture
def watcher(small: ServerProcess) -> Iterator[Watcher]:
    watcher = Watcher(small)
    yield watcher
    watcher.over = True
    watcher.join(HANG_S)
    assert not watcher.refused
    assert watcher.health[-1]["status"] == "ok"


def test_a_process_that_is_killed_hides_nothing_of_the_others(small: ServerProcess, watcher: Watcher) -> None:
    before = set(replicas(small))
    eventually(lambda: bool(watcher.states("ok")))
    processes = psutil.Process(small.process.pid).children(recursive=True)
    of_serve = [each for each in processes if " ".join(each.cmdline()).startswith("ray::Serve")]
    victim = next(each for each in of_serve if "infer:replica" in " ".join(each.cmdline()))
    victim.suspend()  # the watcher must see no error while it hangs, either
    eventually(lambda: any(len(states) == 1 for states in watcher.states("degraded")))
    watcher.health.clear()
    victim.kill()
    eventually(lambda: any(len(states) == 1 for states in watcher.states("degraded")))
    eventually(lambda: len(set(replicas(small)) - before) == 1)
    eventually(lambda: watcher.health[-1]["status"] == "ok")


def test_clients_find_one_port(small: ServerProcess) -> None:
    """Other HTTP servers of Serve's would go around the front's checks. Ray's ports speak gRPC."""
    for process in psutil.Process(small.process.pid).children(recursive=True):
        if not " ".join(process.cmdline()).startswith(("ray::Serve", "ray::Proxy")):
            continue
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port != small.port:
                with pytest.raises(httpx.RemoteProtocolError):
                    httpx.get(f"http://127.0.0.1:{each.laddr.port}/health", timeout=HANG_S)
    assert small.complete()["usage"]["completion_tokens"] == 8


def test_an_engine_that_dies_is_replaced_and_its_request_is_answered_by_another(
    small: ServerProcess, death: Path, watcher: Watcher
) -> None:
    before = set(replicas(small))
    death.touch()
    assert small.complete()["usage"]["completion_tokens"] == 8
    assert not death.exists()
    assert small.complete()["usage"]["completion_tokens"] == 8  # even if Serve has not noticed yet
    eventually(lambda: len(replicas(small)) == 2 and len(set(replicas(small)) & before) == 1)
    for _ in range(4):
        assert small.complete()["usage"]["completion_tokens"] == 8
    eventually(lambda: watcher.health[-1]["status"] == "ok")
    assert any("engine_dead" in states.values() for states in watcher.states("degraded"))


def test_a_stream_without_a_byte_goes_on_at_another_replica_if_its_engine_dies(
    small: ServerProcess, death: Path
) -> None:
    before = set(replicas(small))
    death.touch()
    events = list(small.events())
    assert not death.exists()
    assert [name for name, _ in events] == ["token"] * 8 + ["done"]
    eventually(lambda: len(replicas(small)) == 2 and len(set(replicas(small)) & before) == 1)


def test_replicas_with_one_folder_have_a_file_of_their_own_each(tmp_path: Path) -> None:
    flags = ("--kv-tier", str(tmp_path), "--kv-tier-bytes", str(2**24))
    body = {"prompt": "Once upon a time there was a little dog. " * 8, "max_tokens": 8}
    answers = []
    for _ in range(2):  # a restart
        with running("phase11_tiered", *flags) as server:
            eventually(lambda: len(list(tmp_path.iterdir())) == 2)
            answers += [server.complete(**body)["choices"][0]["text"] for _ in range(2)]
            eventually(lambda: server.counters()["tier_written_bytes"] + server.counters()["tier_hits"] > 0)
            assert server.counters()["tier_failures"] == 0
    assert len(set(answers)) == 1
    names = sorted(path.name for path in tmp_path.iterdir())
    model = names[0].removesuffix("-0.kv")
    assert names == [f"{model}-0.kv", f"{model}-1.kv"]
