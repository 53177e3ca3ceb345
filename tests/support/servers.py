"""Servers in processes, in threads and as bare apps; clients of them; checks of their answers."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

import httpx
import psutil
from fastapi.testclient import TestClient

from common.hosting.local import LocalEngine
from common.models.registry import open_checkpoint
from common.server import run as serve
from common.server.app import create_app
from common.server.http import sockets
from common.server.http.connections import Config
from common.server.http.middleware import AllowedHosts
from common.server.options import ServerOptions
from common.server.service import Service
from common.startup.phases import find_phase, phase_names
from tests.support.forked import Forked

HANG_S = 120.0  # far longer than any wait on a busy machine: only a hang takes so long
MODEL = "m"  # the name of the model in apps without a server
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
MESSAGES: list[Any] = [
    {"role": "system", "content": "You tell short stories."},
    {"role": "user", "content": "Tell me a story about a brave fox."},
]
PREFIXES = ("/v1", "/openai/v1")
BATCH, QUEUE = 4, 6  # sequences that a gated server computes together, and requests that may wait

Event = tuple[str, dict[str, Any]]

PHASES = phase_names()


def called_from_python(phase: str) -> tuple[str, ...]:
    """Return options of a server whose passes a test can hold and break: recordings would skip the hooks."""
    return ("--no-captured-steps",) if "captured_steps" in find_phase(phase).Config.model_fields else ()


def rendered(messages: list[Any], **options: Any) -> list[int]:
    """Return the prompt tokens of a conversation in the bundled model's chat template."""
    tokenizer = open_checkpoint("zoo:llama-tiny").tokenizer()
    assert tokenizer.chat_template is not None
    return tokenizer.encode(tokenizer.chat_template.render(messages, **options), add_special_tokens=False)


class Served:
    """A server that listens, with a client for it.

    Attributes:
        url: its address.
        model: the name of its model.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8} | fields

    def chat_body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 8} | fields

    def response_body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "input": MESSAGES, "temperature": 0, "max_output_tokens": 8} | fields

    def ask(self, path: str, *, headers: Any = None, **fields: Any) -> httpx.Response:
        """Post to a route of completions, of chat or of responses."""
        forms = {"/chat/completions": self.chat_body, "/responses": self.response_body}
        body = next((form for end, form in forms.items() if path.endswith(end)), self.body)
        return self.client.post(path, json=body(**fields), headers=headers)

    def post(self, **fields: Any) -> httpx.Response:
        """Request a completion. It does not stream unless `fields` say so."""
        return self.ask("/v1/completions", **({"stream": False} | fields))

    def chunks(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the chunks of a plain stream, which has only `data` lines and ends with `[DONE]`."""
        response = self.ask(path, **({"stream": True} | fields))
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        *events, done = response.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def complete(self, **fields: Any) -> dict[str, Any]:
        return answer_of(self.post(**fields))

    def text(self, **fields: Any) -> str:
        """Return the text of a completion's only choice."""
        (choice,) = self.complete(**fields)["choices"]
        return str(choice["text"])

    def assert_serves(self) -> None:
        """Assert that the next request is served."""
        assert self.complete(max_tokens=1)["usage"]["completion_tokens"] == 1

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

    def connect(self, sent: bytes = b"", *, buffer_bytes: int | None = None) -> socket.socket:
        """Return a connection after sending bytes on it. Nothing is read."""
        connection = socket.socket()
        if buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        connection.settimeout(HANG_S)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(sent)
        return connection

    def raw(self, **fields: Any) -> socket.socket:
        """Return a connection with a small buffer after requesting a completion on it. Nothing is read."""
        return self.connect(with_body(self.body(**fields)), buffer_bytes=4096)

    def counters(self) -> dict[str, Any]:
        """The engine's counters since the test began."""
        now = self.client.get("/telemetry", params={"since_step": 2**40}).json()["counters"]
        return {name: count - self.counted.get(name, 0) for name, count in now.items()}

    def queue_room(self) -> int:
        room: int = self.client.get("/telemetry", params={"since_step": 2**40}).json()["queue_room"]
        return room


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of an answer, whose status must be 200."""
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


class ServerProcess(Served):
    """A phase's server, started with flags, on a free port.

    Args:
        phase: name of its package.
        flags: its options.
        module: the module whose `main` serves, instead of `common.server.run`.
        env: environment variables beside those of the tests.
        command: the words of a command that serves with these options, to be started as users do. If None, the
            server is a fork, which starts sooner (`tests.support.forked`).
        headers: of the client.
        settings: of the client.
    """

    def __init__(
        self,
        phase: str,
        *flags: str,
        module: str = "common.server.run",
        env: dict[str, str] | None = None,
        command: Sequence[str] | None = None,
        headers: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        flags = ("--port", "0", "--dtype", "float32", "--device", "cpu", *flags)
        self.process: subprocess.Popen[str] | Forked
        if command is None:
            self.process = Forked(module, phase, flags, env=env)
        else:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | (env or {}),
            )
        self.log: list[str] = []
        self.logged = 0  # number of lines when the test began
        self.said: queue.Queue[str] = queue.Queue()
        self._ready = threading.Event()
        self._ready_url = ""
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read_log, self._read_output)
        ]
        for reader in self._readers:
            reader.start()
        if not self._ready.wait(HANG_S):
            self.signal()  # SIGTERM, because a cluster must stop its own processes
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
        """Wait until the engine has ended all requests of earlier tests, then reset `counters` and `log_text`."""
        self.counted = {}
        eventually(self._is_idle)
        self.counted = self.counters()
        self.forget_log()

    def _is_idle(self) -> bool:
        counters = self.counters()
        ended = sum(counters[f"requests_{end}"] for end in ("finished", "failed", "cancelled"))
        return bool(counters["requests_added"] == ended)

    def forget_log(self) -> None:
        """Leave all lines so far out of `log_text`."""
        self.logged = len(self.log)

    @property
    def log_text(self) -> str:
        """The lines that were logged since the test began."""
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
        """Wait until the process has ended and its output is read to the end. Returns its exit code."""
        code = self.process.wait(HANG_S)
        for reader in self._readers:
            reader.join(HANG_S)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()  # a reader of a closed pipe would raise, and fail the test that runs then
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class LocalServer(Served):
    """A phase's server in a thread of this process, so that a test has access to its parts.

    Args:
        phase: name of its package.
        server_options: options of the server.
        options: options of the engine.
    """

    def __init__(
        self,
        phase: str,
        *,
        server_options: ServerOptions | None = None,
        **options: Any,
    ) -> None:
        package = find_phase(phase)
        config = package.Config(device="cpu", dtype="float32", **options)
        self.engine = package.build_engine(config)
        self.async_engine = LocalEngine(self.engine)
        self.listener = sockets.bind("127.0.0.1", 0)
        # With a small buffer, a few hundred tokens fill it if a client reads nothing.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        server_options = server_options or ServerOptions()
        app = create_app(self.async_engine, server_options)
        self.service: Service = app.state.server
        http_config = Config(app, server_options, self.service.answers)
        self.http = serve.Server(http_config, self.service, ready="ready")
        self._thread = threading.Thread(target=self.http.run, args=([self.listener],))
        self._thread.start()
        eventually(lambda: self.http.started)
        super().__init__(sockets.url_of(self.listener))

    def signal(self) -> None:
        """Shut down as after SIGTERM."""
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


# ---------------------------------------------------------------------- apps without a socket


def app_with(
    phase: str = "phase5_continuous",
    *,
    model: str = "zoo:llama-tiny",
    hosts: AllowedHosts | None = None,
    **options: Any,
) -> TestClient:
    """Return a client of an app with a small engine. `options` are the server's."""
    package = find_phase(phase)
    engine = package.build_engine(package.Config(model=model, device="cpu", dtype="float32", max_seq_len=64))
    return TestClient(
        create_app(LocalEngine(engine), ServerOptions(served_model_name=[MODEL], **options), hosts)
    )


# ---------------------------------------------------------------------- several clients


def in_background(count: int, ask: Callable[[int], Any]) -> list[Future[Any]]:
    """Call `ask` `count` times at once, each time in a thread of its own."""
    pool = ThreadPoolExecutor(count)
    together = threading.Barrier(count)

    def wait_and_ask(number: int) -> Any:
        together.wait(HANG_S)
        return ask(number)

    return [pool.submit(wait_and_ask, number) for number in range(count)]


@contextmanager
def asking_for_health(url: str) -> Iterator[list[httpx.Response]]:
    """Ask a server for `/health` every 20 ms, in a thread of its own. Yields the answers so far."""
    answers: list[httpx.Response] = []
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=HANG_S) as client:
            while not over.wait(0.02):
                answers.append(client.get("/health"))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join()


def engine_of(server: int) -> psutil.Process:
    """Return the engine's process, a child of the server's process."""
    found: list[psutil.Process] = []

    def has_started() -> bool:
        started = [(child, " ".join(child.cmdline())) for child in psutil.Process(server).children()]
        found[:] = [child for child, words in started if "spawn_main" in words or "forkserver" in words]
        return len(found) == 1

    eventually(has_started)
    return found[0]


def hold_a_full_batch(server: ServerProcess, **fields: Any) -> Future[httpx.Response]:
    """Submit a full batch of sequences, and hold their first pass."""
    server.order("hold")
    server.forget_output()
    (batch,) = in_background(1, lambda _: server.post(prompt=["Once"] * BATCH, **fields))
    server.expect("held")
    return batch


# ---------------------------------------------------------------------- requests and answers as bytes


def with_body(body: Any, head: bytes = HEAD) -> bytes:
    """Return the bytes of a request with this body, encoded as JSON unless it is bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(content), content)


def everything(connection: socket.socket) -> bytes:
    """Read until the server closes or resets the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(65536):
            received += more
    return received


# ---------------------------------------------------------------------- streams and errors


def read_events(response: httpx.Response) -> Iterator[Event]:
    """Yield the named events of a stream, without its comments."""
    name = ""
    for line in response.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def texts(events: list[Event]) -> dict[int, str]:
    """Return each choice's text, joined from its token events."""
    joined: dict[int, str] = {}
    for name, data in events:
        if name == "token":
            choice = data["choices"][0]
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
            assert choice["text"] == data["token"]
    return joined


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true. Fails after `HANG_S` seconds."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def assert_error(
    response: httpx.Response, status: int, param: str | None = None, code: str | None = None, says: str = ""
) -> None:
    """Assert that an answer is an error in the common form, without paths or names of the server's code."""
    assert response.status_code == status, response.text
    for word in ("Traceback", "/common/", ".py", "pydantic", "site-packages", "0x"):
        assert word not in response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 4096
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert says in body["error"]["message"]
    assert body["error"]["param"] == param
    if code is not None:
        assert body["error"]["code"] == code
    assert ("retry-after" in response.headers) == (status == 503)
    # OpenAI's library sends a failed request again. After these statuses a retry would fail, too.
    assert (response.headers.get("x-should-retry") == "false") == (status in (500, 504))
