"""`serve deploy` changes an option while clients are served, as on a real cluster."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.environment import prepare
from common.server.http.sockets import bind
from tests.support.servers import HANG_S, eventually

pytestmark = pytest.mark.cluster

CLIENTS = 6


def free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


class Deployed:
    """A Ray cluster with a dashboard, to which `serve deploy` sends its file."""

    def __init__(self, folder: Path) -> None:
        prepare()
        from ray.cluster_utils import Cluster

        self.port, self._dashboard = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._file = folder / "cluster.yaml"
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "object_store_memory": 80 * 2**20,
                "include_dashboard": True,
                "dashboard_port": self._dashboard,
            },
        )

    def deploy(self, **options: Any) -> None:
        args = {"phase": 8, "replicas": 2, "cpus": 0.25, "device": "cpu", "dtype": "float32"} | options
        lines = [
            "proxy_location: HeadOnly",
            f"http_options: {{host: 127.0.0.1, port: {self.port}}}",
            "applications:",
            "  - name: infer",
            "    import_path: cluster.app:build",
            f"    args: {args}",
        ]
        self._file.write_text("\n".join(lines))
        serve = Path(sys.executable).with_name("serve")
        subprocess.run(
            [serve, "deploy", self._file, "--address", f"http://127.0.0.1:{self._dashboard}"],
            check=True,
            capture_output=True,
            timeout=HANG_S,
        )

    def seats(self) -> list[int]:
        """Return the seats of each replica; an empty list before the cluster answers."""
        try:
            said = httpx.get(f"{self.url}/telemetry", timeout=HANG_S)
        except httpx.HTTPError:
            return []
        return (
            [each["max_batch_size"] for each in said.json()["replicas"].values()] if said.is_success else []
        )

    def close(self) -> None:
        self.cluster.shutdown()


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    cluster = Deployed(tmp_path)
    yield cluster
    cluster.close()


def test_no_request_fails_while_an_option_is_changed(deployed: Deployed) -> None:
    deployed.deploy(max_batch_size=4)
    eventually(lambda: deployed.seats() == [4, 4])
    over = threading.Event()
    failed: list[str] = []
    counts = [0] * CLIENTS

    def ask(number: int) -> None:
        body = {"model": "zoo:llama-tiny", "prompt": f"Client {number}", "max_tokens": 60, "ignore_eos": True}
        with httpx.Client(timeout=HANG_S) as client:
            while not over.is_set():
                streamed = counts[number] % 2 == 0
                try:
                    answer = client.post(f"{deployed.url}/v1/completions", json=body | {"stream": streamed})
                    ended = answer.text.count("event: done") if streamed else 1
                    if answer.status_code != 200 or ended != 1:
                        failed.append(f"{answer.status_code}: {answer.text[-300:]}")
                except httpx.HTTPError as error:
                    failed.append(repr(error))
                counts[number] += 1

    clients = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    eventually(lambda: min(counts) > 0)
    deployed.deploy(max_batch_size=6)
    eventually(lambda: deployed.seats() == [6, 6])
    reached = list(counts)
    eventually(lambda: all(now > before for now, before in zip(counts, reached, strict=True)))
    over.set()
    for client in clients:
        client.join(HANG_S)
    assert not failed
