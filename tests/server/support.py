"""Servers in processes of their own, and clients that read their streams."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

from common.phases import find_phase
from common.server import serve
from common.server.app import create_app
from common.server.connections import Config, ConnectionLimits
from common.server.service import Service
from common.server.stream import Backlogs
from common.worker import EngineWorker
from tests.server.forked import ForkedProcess

HANG_S = 120.0  # nothing takes nearly so long, on a busy machine either; only a hang does

Event = tuple[str, dict[str, Any]]


class Served:
    """A server that listens, and requests to it.

    Attributes:
        url: where.
        model: what it calls its model.
        counted: the engine's counters when the test began.
    """

    def __init__(self, url: str, headers: dict[str, str] | None = None, **settings: Any) -> None:
        self.url = url
        self.counted: dict[str, Any] = {}
        if url.startswith("unix:"):
            settings["transport"] = httpx.HTTPTransport(uds=url.removeprefix("unix:"))
            url = "http://localhost"
        self.client = httpx.Client(base_url=url, timeout=HANG_S, headers=headers, **settings)
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8} | fields

    def post(self, **fields: Any) -> httpx.Response:
        """A completion that does not stream unless asked to."""
        return self.client.post("/v1/completions", json=self.body(**({"stream": False} | fields)))

    def complete(self, **fields: Any) -> dict[str, Any]:
        response = self.post(**fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    @contextmanager
    def streaming(self, **fields: Any) -> Iterator[Iterator[Event]]:
        with (
            httpx.Client(base_url=self.url, timeout=HANG_S, headers=self.client.headers) as client,
            client.stream(
                "POST", "/v1/completions", json=self.body(**({"stream": True} | fields))
            ) as response,
        ):
            assert response.status_code == 200, response.read()
            yield read_events(response)

    def events(self, **fields: Any) -> list[Event]:
        with self.streaming(**fields) as events:
            return list(events)

    def raw(self, **fields: Any) -> socket.socket:
        """A connection on which a request has been sent, and nothing read. Its buffer is small."""
        body = json.dumps(self.body(**fields)).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(HANG_S)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        return connection

    def counters(self) -> dict[str, Any]:
        """The engine's counters since the test began."""
        now = self.client.get("/telemetry", params={"since_step": 2**40}).json()["counters"]
        return {name: count - self.counted.get(name, 0) for name, count in now.items()}

    def queue_room(self) -> int:
        room: int = self.client.get("/telemetry", params={"since_step": 2**40}).json()["queue_room"]
        return room


class ServerProcess(Served):
    """A phase's server, started with flags, on a free port. Settings are those of the client.

    With variables of its own (`env`) it is a process that was started, else one that was forked.
    """

    def __init__(
        self,
        phase: str,
        *flags: str,
        module: str | None = None,
        env: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        name, *arguments = [module, phase] if module else [phase]
        arguments += ["--port", "0", "--dtype", "float32", "--device", "cpu", *flags]
        self.process: ForkedProcess | subprocess.Popen[str]
        if env is None:
            self.process = ForkedProcess(name, arguments)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", name, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
            )
        self.log: list[str] = []
        self.logged = 0  # lines that were there when the test began
        self.said: queue.Queue[str] = queue.Queue()
        self._ready = threading.Event()
        self._ready_url = ""
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read_log, self._read_output)
        ]
        for reader in self._readers:
            reader.start()
        if not self._ready.wait(HANG_S):
            self.signal()  # a cluster has processes of its own to take down
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait()
            self.close()
            raise AssertionError(f"the server did not start:\n{self.log_text}")
        assert self._ready_url, f"the server ended:\n{self.log_text}"
        super().__init__(self._ready_url, headers, **settings)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            ready = re.search(r'ready: .* at ((?:https?://|unix:)[^\s"]+)', line)
            if ready:
                self._ready_url = ready[1]
                self._ready.set()
        self._ready.set()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(line.strip())

    def begin_test(self) -> None:
        """Wait until the engine has ended every request of earlier tests; count and log from here on."""
        self.counted = {}
        eventually(self._is_idle)
        self.counted = self.counters()
        self.forget_log()

    def _is_idle(self) -> bool:
        counters = self.counters()
        ended = sum(counters[f"requests_{end}"] for end in ("finished", "failed", "cancelled"))
        return bool(counters["requests_added"] == ended)

    def forget_log(self) -> None:
        """Leave out of `log_text` all lines that have come."""
        self.logged = len(self.log)

    @property
    def log_text(self) -> str:
        """What was logged since the test began."""
        return "".join(self.log[self.logged :])

    # ------------------------------------------------------------------ orders to a gated server

    def order(self, order: str) -> None:
        """Send an order to a gated server, and wait until it is in force."""
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        self.expect(order)

    def expect(self, line: str) -> None:
        deadline = time.monotonic() + HANG_S
        while self.said.get(timeout=deadline - time.monotonic()) != line:
            pass

    def forget_output(self) -> None:
        while not self.said.empty():
            self.said.get_nowait()

    def memory_mb(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    # ------------------------------------------------------------------ the end

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(HANG_S)

    def read_the_rest(self) -> None:
        """Wait for all that a process which has ended wrote before."""
        for reader in self._readers:
            reader.join(HANG_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class LocalServer(Served):
    """A phase's server in a thread of this process, so that a test can take hold of its parts.

    Args:
        phase: its package's name.
        settings: of connections, of bodies and of what is left unread.
        options: of the engine.
    """

    def __init__(
        self,
        phase: str,
        *,
        limits: ConnectionLimits | None = None,
        backlogs: Backlogs | None = None,
        body_timeout_s: float = 30.0,
        shutdown_timeout_s: float = 30.0,
        **options: Any,
    ) -> None:
        package = find_phase(phase)
        config = package.Config(device="cpu", dtype="float32", **options)
        self.worker = EngineWorker(lambda: package.build_engine(config))
        self.engine = self.worker.build()
        self.listener = serve.bind("127.0.0.1", 0)
        # A few hundred tokens suffice to fill what the kernel takes for a client that reads nothing.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        backlogs = backlogs or Backlogs()
        app = create_app(self.engine, worker=self.worker, body_timeout_s=body_timeout_s, backlogs=backlogs)
        self.service: Service = app.state.server
        self.http = serve.Server(
            Config(
                app,
                limits or ConnectionLimits(),
                backlogs,
                self.service.answers,
                lifespan="on",
                ws="none",
                log_config=None,
                access_log=False,
            ),
            self.service,
            ready="ready",
            shutdown_timeout_s=shutdown_timeout_s,
        )
        self._thread = threading.Thread(target=self.http.run, args=([self.listener],))
        self._thread.start()
        eventually(lambda: self.http.started)
        super().__init__(serve.url_of(self.listener))

    def signal(self) -> None:
        """As SIGTERM does."""
        self.http.handle_exit(signal.SIGTERM, None)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        self.client.close()
        if not self.ended:
            self.http.should_exit = True
        self._thread.join(HANG_S)
        assert self.ended


def read_events(response: httpx.Response) -> Iterator[Event]:
    """The named events of a stream, comments left out."""
    name = ""
    for line in response.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def texts(events: list[Event]) -> dict[int, str]:
    """Each choice's text, joined from its token events."""
    joined: dict[int, str] = {}
    for name, data in events:
        if name == "token":
            choice = data["choices"][0]
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
            assert choice["text"] == data["token"]
    return joined


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what must come, but not at once. A hang fails."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def assert_error(
    response: httpx.Response, status: int, param: str | None = None, code: str | None = None
) -> None:
    """An answer in the one shape that errors have."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 4096
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["param"] == param
    if code is not None:
        assert body["error"]["code"] == code
    assert ("retry-after" in response.headers) == (status == 503)
