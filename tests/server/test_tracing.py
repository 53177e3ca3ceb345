"""Traces of servers: read over HTTP, and written to a file until the server ends, in whichever way it ends."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.server.options import ServerOptions
from common.server.page.live_view import MAX_RECORDINGS
from tests.support.servers import HANG_S, LocalServer, ServerProcess, assert_error, eventually, everything
from tests.support.traces import assert_valid, read_trace, requests_of

SERVED = "phase7_chunked"


# ---------------------------------------------------------------------- GET /trace


def test_a_trace_of_the_next_moments(server: ServerProcess) -> None:
    server.begin_test()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.client.get, "/trace", params={"seconds": 1.5})
        again = pool.submit(server.client.get, "/trace", params={"seconds": 0.1})  # two traces at a time
        while not asked.done():
            server.complete(max_tokens=4)
        response = asked.result(HANG_S)
    assert response.status_code == again.result().status_code == 200
    assert response.headers["content-type"] == "application/json"
    for each in (response, again.result()):
        assert each.content.endswith(b"]\n")
        assert_valid(read_trace(each.content))
    tracks = requests_of(read_trace(response.content))
    reasons = [track[-1]["args"]["reason"] for track in tracks.values()]
    assert "length" in reasons
    assert set(reasons) <= {"length", "still running"}
    steps = [e for e in read_trace(response.content) if e["name"].startswith("step ")]
    assert sum(step["args"]["prefill_tokens"] for step in steps) > 0


def test_a_reader_who_leaves_has_a_trace_and_the_server_goes_on(server: ServerProcess) -> None:
    with server.client.stream("GET", "/trace", params={"seconds": 3600}) as response:
        chunks = response.iter_bytes()
        data = next(chunks)
        server.complete(max_tokens=2)
        while b"step " not in data:
            data += next(chunks)
    assert read_trace(data)
    assert len(server.complete(max_tokens=3)["choices"]) == 1
    assert_valid(read_trace(server.client.get("/trace", params={"seconds": 0.05}).content))


@pytest.fixture
def local() -> Iterator[LocalServer]:
    """A server whose clients must read sent bytes within half a second."""
    server = LocalServer(SERVED, server_options=ServerOptions(send_timeout=0.5), max_seq_len=4096)
    yield server
    eventually(lambda: not server.engine.watchers)
    assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
    server.close()


def ask(server: LocalServer, method: bytes, path: bytes) -> socket.socket:
    """Return a connection with a small buffer, after sending a request on it."""
    request = b"%b %b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % (method, path)
    return server.connect(request, buffer_bytes=4096)


def test_too_many_traces_are_refused(local: LocalServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_RECORDINGS):
            reader = stack.enter_context(ask(local, b"GET", b"/trace?seconds=3600"))
            assert reader.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert_error(local.client.get("/trace"), 503, None, "too_many_traces")
        reader.close()
        eventually(lambda: local.client.get("/trace", params={"seconds": 0.01}).status_code == 200)
        assert_error(local.client.get("/trace", params={"seconds": 0}), 422, "seconds")


@pytest.mark.parametrize("path", [b"/trace?seconds=3600", b"/steps"])
def test_head_of_an_endless_route_ends_at_once(local: LocalServer, path: bytes) -> None:
    with ask(local, b"HEAD", path) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answers = everything(connection)
        eventually(lambda: not local.engine.watchers)
    head, _, version = answers.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert version.startswith(b"HTTP/1.1 200 ")


def test_a_reader_of_a_trace_that_stalls_is_given_up(local: LocalServer) -> None:
    with ask(local, b"GET", b"/trace?seconds=3600"):
        eventually(lambda: bool(local.engine.watchers))
        local.complete(max_tokens=300, ignore_eos=True)  # more than the buffers hold
        eventually(lambda: not local.engine.watchers)


# ---------------------------------------------------------------------- --trace FILE


def test_a_file_is_complete_when_the_server_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "server.trace"
    with ServerProcess(SERVED, "--trace", str(path)) as server:
        for length in (3, 5):
            server.complete(max_tokens=length)
        with server.streaming(max_tokens=2000, ignore_eos=True) as events:
            next(events)  # and leave: cancelled
        eventually(lambda: server.counters()["requests_cancelled"] == 1)
        with server.client.stream("GET", "/trace", params={"seconds": 3000}) as reading:
            server.signal()  # a reader of /trace does not hold up the end
            assert read_trace(reading.read()) is not None
        assert server.wait() == 0
        assert "Traceback" not in server.log_text
    data = path.read_bytes()
    assert data.endswith(b"]\n")
    events = read_trace(data)
    assert_valid(events)
    ends = [track[-1]["args"] for track in requests_of(events).values()]
    assert [end["reason"] for end in ends] == ["length", "length", "cancelled"]
    assert [end["new tokens"] for end in ends[:2]] == [3, 5]
