"""Limits on connections: requests that come slowly or in pieces, answers that nobody reads, too many connections.

Most tests use real sockets and a server in this process with short timeouts. After each of them, the next request
must be served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import sys
import time
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from common.server.api.bodies import Bodies, expire
from common.server.errors import unavailable
from common.server.http import connections
from common.server.http.connections import (
    MAX_PIPELINED_BYTES,
    Config,
    Connection,
    ConnectionLimits,
    TooMany,
)
from common.server.http.framing import EVENTS_PER_TURN, FREE_BODY_PIECES
from common.server.http.middleware import OPEN_PATHS, PaceRefusals
from common.server.http.sockets import LingeringTransport, allow_open_files, find_lost_peers
from common.server.service import Service
from tests.server.support import (
    HANG_S,
    HEAD,
    LocalServer,
    app_with,
    assert_told,
    eventually,
    everything,
    with_body,
)

CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
TOKENIZE = HEAD.replace(b"/v1/completions", b"/tokenize")
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def strict() -> Iterator[LocalServer]:
    """A server with short timeouts."""
    with LocalServer(
        "phase5_continuous",
        limits=ConnectionLimits(keep_alive_s=0.6, receive_s=0.4, send_s=0.5),
        body_timeout_s=1.0,
        max_seq_len=4096,
    ) as server:
        server.client.headers["Connection"] = (
            "close"  # the server might close a kept connection just when a request is sent
        )
        yield server


@pytest.fixture(autouse=True)
def next_request_is_served(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    caplog.set_level(logging.INFO, "common")
    yield
    if "strict" in request.fixturenames:
        request.getfixturevalue("strict").assert_serves()
    assert not [record for record in caplog.records if record.exc_info], caplog.text


# ---------------------------------------------------------------------- requests that come slowly, or never


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"POST /v1/comp", 408, "request_timeout"),
        (HEAD, 408, "request_timeout"),
        (HEAD + b"Content-Length: 7\r\n", 408, "request_timeout"),
        (HEAD + b'Content-Length: 100\r\n\r\n{"model": ', 408, "body_timeout"),
        (TOKENIZE + b'Content-Length: 100\r\n\r\n{"model": ', 408, "body_timeout"),
        (CHUNKED + b"1\r\n \r\n" * (FREE_BODY_PIECES + 2), 413, "too_many_pieces"),
        (b"nonsense\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"X-Request-ID: " + b"x" * 2**20, 431, "head_too_large"),
    ],
    ids=lambda value: repr(value)[-40:],
)
def test_a_request_that_does_not_come_whole_or_is_none(
    strict: LocalServer, sent: bytes, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    strict.connect(sent).close()  # a client that leaves instead
    with strict.connect(sent) as connection:
        assert_told(everything(connection), status, code)
    if TOKENIZE not in sent:  # refusals of /tokenize are not logged
        eventually(lambda: f"refused: {status} {code}" in caplog.text)
    assert strict.worker.num_waiting() == 0


def test_a_body_that_trickles(strict: LocalServer) -> None:
    with strict.connect(HEAD + b"Content-Length: 1000\r\n\r\n") as connection:
        answer = b""
        connection.settimeout(0.05)
        for _ in range(int(HANG_S / 0.05)):
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65536)
            if answer:
                break
            connection.sendall(b" ")
        connection.settimeout(HANG_S)
        answer += everything(connection)
    assert_told(answer, 408, "body_timeout")


def test_a_body_that_goes_on_behind_its_answer(strict: LocalServer) -> None:
    with strict.connect(HEAD + b"Content-Length: 9000000\r\n\r\n") as connection:
        assert b" 413 " in connection.recv(65536)
        with contextlib.suppress(OSError):  # the server closes while the client still sends
            for _ in range(int(HANG_S / 0.05)):
                connection.sendall(b" " * 100)
                time.sleep(0.05)
            pytest.fail("the connection is still open")


@pytest.mark.parametrize("first", [b"", GET_HEALTH])
def test_a_connection_without_a_request(strict: LocalServer, first: bytes) -> None:
    with strict.connect(first) as connection:
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK" if first else b"")
    assert bool(answer) == bool(first)


def test_requests_one_behind_the_other(strict: LocalServer) -> None:
    with strict.connect(GET_HEALTH * 5 + GET_HEALTH[:9]) as connection:
        time.sleep(0.1)
        connection.sendall(GET_HEALTH[9:])
        assert everything(connection).count(b" 200 OK") == 6


def test_nonsense_behind_an_answer(strict: LocalServer) -> None:
    with strict.connect(CHUNKED.replace(b"POST", b"PUT")) as connection:
        answer = b""
        while not answer.endswith(b"}}"):
            answer += connection.recv(65536)
        assert b" 405 " in answer
        connection.sendall(b"no chunk\r\n")
        assert everything(connection) == b""


def test_a_target_with_a_host(strict: LocalServer) -> None:
    """Clients of a proxy send targets with a host. It replaces the host of the header."""
    for target, status in (
        (b"http://127.0.0.1/health", 200),
        (b"HTTP://user@127.0.0.1:1?x=1", 200),
        (b"http://127.0.0.1/nowhere?x=1", 404),
        (b"http://[::1/health", 400),
        (b"ftp://127.0.0.1/health", 404),
    ):
        with strict.connect() as connection:
            connection.sendall(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
            assert everything(connection).startswith(b"HTTP/1.1 %d " % status), target


LARGE_BODY = HEAD + b"Content-Length: 1000000\r\n\r\n" + b" " * 300_000  # the rest does not come


@contextlib.contextmanager
def rate_used_up(server: LocalServer) -> Iterator[Bodies]:
    """Context manager: all large bodies wait during the block."""
    bodies, loop = server.service.bodies, server.http._loop
    assert loop is not None
    asyncio.run_coroutine_threadsafe(bodies._turn.acquire(), loop).result(HANG_S)
    yield bodies
    loop.call_soon_threadsafe(bodies._turn.release)


def test_too_many_bodies_wait(strict: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bodies that wait are served later, though they wait for longer than a body may take to come."""
    monkeypatch.setattr(Bodies, "MOST_WAITING", 4)
    body = json.dumps(strict.body(stream=False)).encode() + b" " * 100_000
    with contextlib.ExitStack() as clients:
        with rate_used_up(strict) as bodies:
            waiting = [
                clients.enter_context(strict.connect(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body))
                for _ in range(Bodies.MOST_WAITING)
            ]
            eventually(lambda: bodies._waiting == Bodies.MOST_WAITING)
            with strict.connect(LARGE_BODY) as connection:
                assert_told(everything(connection), 503, "bodies_busy")
            strict.assert_serves()
            time.sleep(1.2)
        assert [connection.recv(12) for connection in waiting] == [b"HTTP/1.1 200"] * Bodies.MOST_WAITING
    assert strict.service.bodies._waiting == 0


def have_all_left(server: LocalServer) -> bool:
    """Return whether the server knows of each client that has connected that it has left."""
    loop = server.http._loop
    assert loop is not None

    async def asked() -> bool:
        connections = list(server.http.server_state.connections)
        return all(
            connection._client_left() for connection in connections if isinstance(connection, Connection)
        )

    return asyncio.run_coroutine_threadsafe(asked(), loop).result(HANG_S)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells before the bytes are read")
def test_clients_that_leave_while_their_bodies_wait(strict: LocalServer) -> None:
    with contextlib.ExitStack() as clients:
        with rate_used_up(strict) as bodies:
            for _ in range(Bodies.MOST_WAITING):
                clients.enter_context(strict.connect(LARGE_BODY))
            eventually(lambda: bodies._waiting == Bodies.MOST_WAITING)
            before_s = bodies._paid_until_s
            clients.close()
            eventually(lambda: have_all_left(strict))  # the ends of connections may arrive a moment later
        eventually(lambda: not bodies._waiting)
    eventually(lambda: not strict.http.server_state.connections)
    assert bodies._paid_until_s == before_s, "their bytes use no rate"


# ---------------------------------------------------------------------- requests in pieces


def test_a_body_in_many_pieces(strict: LocalServer) -> None:
    """Parsing the body takes several turns of the event loop."""
    body = json.dumps(strict.body(stream=False, max_tokens=2)).encode()
    small = [body[at : at + 1] for at in range(len(body))]
    pieces = [b" " * 512] * (2 * EVENTS_PER_TURN) + small  # so many pieces need a large body
    request = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    with strict.connect(request * 2) as connection:
        answers = everything(connection)
    assert answers.count(b" 200 OK") == 2
    assert answers.count(b'"completion_tokens":2') == 2


def transport_of(host: str | None = None) -> MagicMock:
    """Return a transport that accepts all data, of a client with this address."""
    transport = MagicMock(spec=asyncio.Transport)
    transport.is_closing.return_value = False
    transport.get_extra_info.side_effect = lambda name, _=None: (
        (host, 5) if name == "peername" and host else None
    )
    return transport


def connection_of(transport: MagicMock, state: ServerState, config: Config) -> Connection:
    connection = Connection(config, state, {})
    connection.connection_made(transport)
    return connection


async def hanging(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(HANG_S)


@pytest.mark.anyio
async def test_a_turn_of_the_event_loop_parses_so_much_and_no_more() -> None:
    """Many chunks of one byte come in one read. They are parsed in several turns. Others are served in between."""
    config = Config(hanging, ConnectionLimits(), lifespan="off", ws="none", log_config=None)
    connection = connection_of(transport_of(), ServerState(), config)
    connection.data_received(CHUNKED + b"1\r\nx\r\n" * 40_000)
    assert 0 < len(connection.cycle.body) < EVENTS_PER_TURN
    connection.data_received(b"1\r\nx\r\n")
    assert len(connection.cycle.body) < EVENTS_PER_TURN, "a packet is no turn of its own"
    await asyncio.sleep(0)
    assert EVENTS_PER_TURN < len(connection.cycle.body) < 2 * EVENTS_PER_TURN
    connection.connection_lost(None)
    for task in connection.tasks:
        task.cancel()


@contextlib.contextmanager
def computing(server: LocalServer) -> Iterator[socket.socket]:
    """Yield a connection whose request is being computed. After the block, the request must be cancelled."""
    server.counted = {}
    server.counted = server.counters()
    with server.connect(with_body(server.body(stream=False, max_tokens=3500, ignore_eos=True))) as connection:
        eventually(lambda: server.engine.telemetry.latest.active == 1)
        yield connection
    eventually(lambda: server.counters()["requests_cancelled"] == 1)


@pytest.mark.parametrize("more", [b"x", GET_HEALTH])
def test_bytes_behind_a_request_do_not_hide_that_its_client_leaves(strict: LocalServer, more: bytes) -> None:
    with computing(strict) as connection:
        connection.sendall(more)
        time.sleep(0.05)  # the server reads these bytes before it sees that the client leaves


def test_too_much_behind_a_request(strict: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    with computing(strict) as connection:
        with contextlib.suppress(OSError):  # the server closes before all bytes are sent
            connection.sendall(b"x" * 2 * MAX_PIPELINED_BYTES)
        assert everything(connection) == b""
    assert "behind a request that is not answered yet: closed" in caplog.text


def test_an_answer_before_the_end_of_the_request_is_the_last(strict: LocalServer) -> None:
    """The client gets the answer while it goes on sending. The server parses no byte after the answer."""
    with strict.connect(CHUNKED.replace(b"POST", b"PUT")) as connection:
        answer = connection.recv(65536)
        for _ in range(20):
            connection.sendall(b"no chunk\r\n" * 1000)
        answer += everything(connection)
    assert_told(answer, 405, "method_not_allowed")


@pytest.mark.anyio
async def test_a_connection_may_be_reset_when_it_is_to_close() -> None:
    transport = transport_of()
    transport.write_eof.side_effect = OSError(107, "Transport endpoint is not connected")
    lingering = LingeringTransport(transport, lambda: True, linger_s=0.01)
    lingering.close()
    assert lingering.is_closing()
    transport.close.assert_not_called()
    await asyncio.sleep(0.1)
    transport.close.assert_called_once()


# ---------------------------------------------------------------------- answers that are not taken


def test_a_stream_that_nobody_reads(strict: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    with strict.raw(stream=True, max_tokens=3000, ignore_eos=True, logprobs=5):
        eventually(lambda: "cancelled (the client left)" in caplog.text)
    assert "a client took too little of its answer for 0.5 s: closed" in caplog.text


def test_an_answer_that_nobody_reads(strict: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    request = with_body({"prompt": "a b " * 50_000, "return_token_strs": True}, TOKENIZE)
    with strict.connect(request, buffer_bytes=4096) as connection:
        eventually(lambda: "took too little of its answer for 0.5 s" in caplog.text)
        assert len(everything(connection)) < 2**18, "the rest was dropped"


def test_an_answer_that_is_read_slowly(strict: LocalServer) -> None:
    """Reading may take longer than the send timeout, if no pause of the client does."""
    body = {"prompt": "a b " * 20_000, "return_token_strs": True}
    with strict.connect(with_body(body, TOKENIZE + b"Connection: close\r\n")) as connection:
        answer = b""
        while more := connection.recv(2**15):
            answer += more
            time.sleep(0.05)
    text = answer.partition(b"\r\n\r\n")[2]
    assert len(json.loads(text)["tokens"]) > 20_000


# ---------------------------------------------------------------------- too many at once


def test_too_many_connections(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SPARE_CONNECTIONS", 4)
    limits = ConnectionLimits(connections=10)
    with LocalServer("phase5_continuous", limits=limits, max_seq_len=64) as server:
        server.client.close()
        eventually(lambda: not server.http.server_state.connections)
        with contextlib.ExitStack() as idle:
            for _ in range(limits.connections):
                idle.enter_context(server.connect())
            eventually(lambda: len(server.http.server_state.connections) == limits.connections)
            with server.connect(with_body({})) as connection:
                assert_told(everything(connection), 503, "too_many_connections")
            with server.connect(GET_HEALTH) as connection:
                assert b" 200 OK" in connection.recv(65536)
            crowd = [idle.enter_context(server.connect()) for _ in range(12)]
            eventually(lambda: len(server.http.server_state.connections) <= limits.connections + 4)
            assert [everything(each) for each in crowd[4:]] == [b""] * 8
            assert caplog.text.count("the most that --max-connections allows") == 1
        eventually(lambda: not server.http.server_state.connections)
        with server.connect(with_body(server.body(stream=False))) as connection:
            assert b" 200 OK" in connection.recv(65536)


@pytest.mark.anyio
async def test_too_many_connections_of_one_address(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(hanging, ConnectionLimits(connections=8), lifespan="off", ws="none", log_config=None)
    state = ServerState()

    def connect_from(host: str) -> Connection:
        return connection_of(transport_of(host), state, config)

    def refused(connection: Connection) -> bool:
        return isinstance(connection.app, TooMany)

    first = [connect_from("192.0.2.1") for _ in range(4)]
    assert not any(refused(each) for each in first)
    assert refused(connect_from("192.0.2.1"))
    assert "4 connections of 192.0.2.1 are open, the most that --max-connections-per-address" in caplog.text
    assert not refused(connect_from("192.0.2.2"))
    for each in list(state.connections):
        each.connection_lost(None)
    assert not config.addresses
    assert not refused(connect_from("192.0.2.1"))
    networks = [connect_from(f"2001:db8::{number:x}") for number in range(5)]
    assert [refused(each) for each in networks] == [False] * 4 + [True], "a machine has as many addresses"
    for each in list(state.connections):
        each.connection_lost(None)
    assert not any(refused(connect_from(host)) for host in ["127.0.0.1"] * 4 + ["::1"] * 4)


@pytest.mark.anyio
@pytest.mark.parametrize("prefix", ["", "/llm"], ids=["taken away", "left"])
async def test_open_paths_are_open_beyond_the_bound_below_a_prefix(prefix: str) -> None:
    passed: list[str] = []
    told: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(scope["path"])

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            told.append(message["status"])

    limits = ConnectionLimits(connections=1)
    config = Config(app, limits, path_prefix="/llm", lifespan="off", ws="none", log_config=None)
    state = ServerState()
    first, second = (connection_of(transport_of(), state, config) for _ in range(2))
    for path in sorted(OPEN_PATHS):
        await second.app({"type": "http", "path": prefix + path}, hanging, send)
    assert passed == [prefix + path for path in sorted(OPEN_PATHS)]
    for path in ("/llm/v1/models", "/v1/models", "/llmhealth", "/other/health"):
        await second.app({"type": "http", "path": path}, hanging, send)
    assert told == [503] * 4
    for each in (first, second):
        each.connection_lost(None)


def test_refusals_of_open_paths_are_not_paced_below_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    paced: list[PaceRefusals] = []

    def refuse(_: Service) -> None:
        raise unavailable("stuck", code="engine_stuck", retry_after_s=1)

    async def turn(middleware: PaceRefusals) -> None:
        paced.append(middleware)

    monkeypatch.setattr(PaceRefusals, "_turn", turn)
    with app_with(root_path="/llm") as client:
        with monkeypatch.context() as stuck:
            stuck.setattr(Service, "require_health", refuse)
            for prefix in ("/llm", ""):
                assert client.get(f"{prefix}/health").status_code == 503
        assert not paced
        assert client.get("/llm/nowhere").status_code == 404
        assert len(paced) == 1
        assert client.get("/llm/health").status_code == 200


def test_as_many_files_as_it_takes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [(1024, 2048)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: now.append(limits))
    assert allow_open_files(500) == 500
    assert now == [(1024, 2048)]
    assert allow_open_files(1024) == 1024
    assert now[-1] == (1024 + 160, 2048)
    assert allow_open_files(5000) == 2048 - 160
    assert now[-1] == (2048, 2048)
    assert "--max-connections 5000 would need 5160 open files" in caplog.text


def test_lost_peers_are_found_by_the_kernel() -> None:
    with socket.socket() as listener:
        find_lost_peers(listener, 60.0)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


# ---------------------------------------------------------------------- the end


def test_half_a_body_does_not_hold_up_the_end() -> None:
    with (
        LocalServer("phase5_continuous", max_seq_len=64) as server,
        server.connect(HEAD + b'Content-Length: 100\r\n\r\n{"model": ') as body,
        server.connect(HEAD),
    ):
        server.assert_serves()  # so the server has accepted both connections
        began = time.monotonic()
        server.signal()
        assert_told(everything(body), 503, "shutting_down")
        eventually(lambda: server.ended)
        assert time.monotonic() - began < 20, "neither 30 s for bodies nor 30 s to shut down"


@pytest.mark.anyio
async def test_the_end_may_come_in_the_moment_when_a_body_is_late() -> None:
    async def read() -> None:
        async with asyncio.timeout(0.01) as deadline:
            try:
                await asyncio.sleep(HANG_S)
            finally:
                expire(deadline)

    with pytest.raises(TimeoutError):
        await read()


def test_a_reader_that_takes_nothing_is_cut_off_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with (
        LocalServer("phase5_continuous", max_seq_len=4096, shutdown_timeout_s=0.2) as server,
        server.raw(stream=True, max_tokens=3000, ignore_eos=True),
    ):
        eventually(lambda: any(each.flow.write_paused for each in server.http.server_state.connections))
        server.signal()
        eventually(lambda: server.ended)
    assert "some requests were not done in time" in caplog.text
    assert "answers of 1 connections were not taken in time: closed" in caplog.text
