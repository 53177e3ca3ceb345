"""Two nodes, one of which is lost. `ray.cluster_utils.Cluster` runs both on this machine, each with its raylet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.environment import prepare
from tests.support.servers import HANG_S, Event, eventually, read_events

pytestmark = pytest.mark.cluster

SEATS, STREAMS = 4, 16
ANSWER = 1500  # tokens, which take seconds

BODY = {
    "model": "zoo:llama-tiny",
    "prompt": "Once upon a time",
    "temperature": 0,
    "max_tokens": ANSWER,
    "ignore_eos": True,
}


class Nodes:
    """A cluster of a head and one more node, with a replica on each node."""

    def __init__(self) -> None:
        prepare()
        from ray.cluster_utils import Cluster

        from cluster.lifecycle import deploy, start_ray
        from cluster.options import read_flags
        from common.server.http.sockets import bind

        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False},
        )
        self.other = self.add_node()
        self.plan = read_flags(
            [
                *("--phase", "7", "--replicas", "2", "--cpus", "1", "--address", self.cluster.address),
                *("--max-batch-size", str(SEATS), "--device", "cpu", "--dtype", "float32"),
                *("--port", str(port), "--log-level", "warning"),
            ]
        )
        start_ray(self.plan)
        deploy(self.plan, port)

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)

    def warm_up(self) -> None:
        """Send requests until both replicas have computed some."""

        def both_have() -> bool:
            for stream in [Stream(self.url, 4) for _ in range(2 * SEATS)]:
                stream.join(HANG_S)
                assert stream.terminal == ["done"]
            said = httpx.get(f"{self.url}/telemetry", timeout=HANG_S).json()["replicas"].values()
            return len(said) == 2 and all(each["counters"]["requests_finished"] > 0 for each in said)

        eventually(both_have)

    def close(self) -> None:
        from cluster.lifecycle import take_down

        take_down(self.plan)
        self.cluster.shutdown()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    cluster = Nodes()
    yield cluster
    cluster.close()


class Stream(threading.Thread):
    """A client that reads one answer to its end."""

    def __init__(self, url: str, tokens: int = ANSWER) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.body = BODY | {"max_tokens": tokens}
        self.events: list[Event] = []
        self.status = 0
        self.ended = False
        self.start()

    def run(self) -> None:
        with (
            httpx.Client(timeout=HANG_S) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=self.body) as response,
        ):
            self.status = response.status_code
            for event in read_events(response):
                self.events.append(event)
        self.ended = True

    @property
    def terminal(self) -> list[str]:
        return [name for name, _ in self.events if name != "token"]

    @property
    def text(self) -> str:
        return "".join(data["token"] for name, data in self.events if name == "token")


def test_a_node_that_is_lost_takes_only_the_streams_that_it_had_begun(nodes: Nodes) -> None:
    nodes.warm_up()
    streams = [Stream(nodes.url) for _ in range(STREAMS)]
    eventually(lambda: sum(bool(stream.events) for stream in streams) >= 2 * SEATS)  # both are full
    begun = [stream for stream in streams if stream.events]
    assert not any(stream.ended for stream in streams)

    nodes.cluster.remove_node(nodes.other, allow_graceful=False)
    killed = time.monotonic()
    after = Stream(nodes.url)  # the remaining node serves new requests
    for stream in [*streams, after]:
        stream.join(HANG_S)
        assert stream.ended, "a stream hangs"

    # Every stream has one end: an error if it had begun on the lost node, otherwise its whole answer.
    assert all(stream.status == 200 and len(stream.terminal) == 1 for stream in [*streams, after])
    cut = [stream for stream in streams if stream.terminal == ["error"]]
    assert len(cut) == SEATS
    assert set(cut) <= set(begun)
    for stream in cut:
        assert stream.events[-1][1]["error"]["code"] == "replica_lost"
    whole = [stream for stream in [*streams, after] if stream.terminal == ["done"]]
    assert len(whole) == STREAMS - SEATS + 1
    assert len({stream.text for stream in whole}) == 1  # no token is missing or came twice
    assert all(len(stream.events) == ANSWER + 1 for stream in whole)
    assert all(whole[0].text.startswith(stream.text) for stream in cut)

    # A new node joins, and Serve starts the missing replica there.
    nodes.add_node()
    nodes.warm_up()
    print(f"two replicas again {time.monotonic() - killed:.1f} s after the loss")
