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
import time
from collections import Counter
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from common.server.http import connections
from common.server.http.connections import FREE_BODY_PIECES, Config, Connection
from common.server.http.middleware import OPEN_PATHS, TOO_MANY, RootPath, TooMany
from common.server.http.sockets import allow_open_files
from common.server.options import ServerOptions
from tests.support.servers import (
    HANG_S,
    HEAD,
    LocalServer,
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
        server_options=ServerOptions(keep_alive_timeout=0.6, body_timeout=0.6, send_timeout=0.5),
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
    records = (*caplog.get_records("call"), *caplog.records)  # the test's, and those since its end
    assert not [record for record in records if record.exc_info]


def assert_told(answer: bytes, status: int, code: str) -> None:
    """Assert that an answer is an error in the common form, and that it closes its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"\r\nconnection: close" in head.lower()
    error = json.loads(body)["error"]
    assert (error["code"], set(error)) == (code, {"message", "type", "param", "code"})


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
        (HEAD + b"X-Request-ID: " + b"x" * 2**15, 431, "head_too_large"),
        (HEAD + b"X-Request-ID: " + b"x" * 2**14 + b"\r\n\r\n", 431, "head_too_large"),  # whole in one packet
    ],
    ids=lambda value: repr(value)[-40:],
)
def test_incomplete_and_invalid_requests_are_refused(
    strict: LocalServer, sent: bytes, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    strict.connect(sent).close()  # a client that leaves instead
    with strict.connect(sent) as connection:
        assert_told(everything(connection), status, code)
    if TOKENIZE not in sent:  # refusals of /tokenize are not logged
        eventually(lambda: f"refused: {status} {code}" in caplog.text)
    assert strict.async_engine.num_waiting() == 0


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


def test_a_body_may_not_go_on_long_behind_its_answer(strict: LocalServer) -> None:
    with strict.connect(HEAD + b"Content-Length: 9000000\r\n\r\n") as connection:
        assert b" 413 " in connection.recv(65536)
        with contextlib.suppress(OSError):  # the server closes while the client still sends
            for _ in range(int(HANG_S / 0.05)):
                connection.sendall(b" " * 100)
                time.sleep(0.05)
            pytest.fail("the connection is still open")


@pytest.mark.parametrize("first", [b"", GET_HEALTH])
def test_an_idle_connection_is_closed(strict: LocalServer, first: bytes) -> None:
    with strict.connect(first) as connection:
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK" if first else b"")
    assert bool(answer) == bool(first)


def test_pipelined_requests_are_answered_in_order(strict: LocalServer) -> None:
    with strict.connect(GET_HEALTH * 5 + GET_HEALTH[:9]) as connection:
        time.sleep(0.1)
        connection.sendall(GET_HEALTH[9:])
        assert everything(connection).count(b" 200 OK") == 6


# ---------------------------------------------------------------------- requests in pieces


def test_a_body_in_many_pieces(strict: LocalServer) -> None:
    body = json.dumps(strict.body(stream=False, max_tokens=2)).encode()
    small = [body[at : at + 1] for at in range(len(body))]
    pieces = [b" " * 1024] * (2 * FREE_BODY_PIECES) + small  # so many pieces need a large body
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


def test_the_rest_of_a_body_is_dropped_behind_its_answer(strict: LocalServer) -> None:
    """A client that writes its whole request before it reads gets the answer, and may send the next request."""
    large = HEAD + b"Content-Length: 9000000\r\n\r\n" + b" " * 9_000_000
    with strict.connect() as connection:
        connection.sendall(large + GET_HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        answers = everything(connection)
    assert answers.startswith(b"HTTP/1.1 413 ")
    assert b" 200 OK" in answers


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


def test_too_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SPARE_CONNECTIONS", 4)
    most = 10
    with LocalServer(
        "phase5_continuous", server_options=ServerOptions(max_connections=most), max_seq_len=64
    ) as server:
        server.client.close()
        eventually(lambda: not server.http.server_state.connections)
        with contextlib.ExitStack() as idle:
            for _ in range(most):
                idle.enter_context(server.connect())
            eventually(lambda: len(server.http.server_state.connections) == most)
            with server.connect(with_body({})) as connection:
                assert_told(everything(connection), 503, "too_many_connections")
            with server.connect(GET_HEALTH) as connection:
                assert b" 200 OK" in connection.recv(65536)
            crowd = [idle.enter_context(server.connect()) for _ in range(12)]
            eventually(lambda: len(server.http.server_state.connections) <= most + 4)
            assert [everything(each) for each in crowd[4:]] == [b""] * 8
        eventually(lambda: not server.http.server_state.connections)
        with server.connect(with_body(server.body(stream=False))) as connection:
            assert b" 200 OK" in connection.recv(65536)


@pytest.mark.anyio
async def test_too_many_connections_of_one_address() -> None:
    config = Config(hanging, ServerOptions(max_connections=8), Counter())
    state = ServerState()

    def connect_from(host: str) -> Connection:
        return connection_of(transport_of(host), state, config)

    def refused(connection: Connection) -> bool:
        return TOO_MANY in connection.app_state

    first = [connect_from("192.0.2.1") for _ in range(4)]
    assert not any(refused(each) for each in first)
    assert refused(connect_from("192.0.2.1"))
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

    guarded = RootPath(TooMany(app), "/llm")
    beyond = {"type": "http", "headers": [], "state": {TOO_MANY: True}}
    for path in sorted(OPEN_PATHS):
        await guarded(beyond | {"path": prefix + path}, hanging, send)
    assert passed == sorted(OPEN_PATHS)
    for path in ("/llm/v1/models", "/v1/models", "/llmhealth", "/other/health"):
        await guarded(beyond | {"path": path}, hanging, send)
    assert told == [503] * 4


def test_the_limit_of_open_files_is_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [(1024, 2048)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: now.append(limits))
    assert allow_open_files(500) == 500
    assert now == [(1024, 2048)]
    assert allow_open_files(1024) == 1024
    assert now[-1] == (1024 + 160, 2048)
    assert allow_open_files(5000) == 2048 - 160
    assert now[-1] == (2048, 2048)
    assert "--max-connections 5000 is too many for the 2048 open files" in caplog.text


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


@pytest.mark.slow
def test_a_reader_that_takes_nothing_is_cut_off_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with (
        LocalServer(
            "phase5_continuous", server_options=ServerOptions(shutdown_timeout=0.2), max_seq_len=4096
        ) as server,
        server.raw(stream=True, max_tokens=3000, ignore_eos=True),
    ):
        eventually(lambda: any(each.flow.write_paused for each in server.http.server_state.connections))
        server.signal()
        eventually(lambda: server.ended)
    assert "some requests were not done in time" in caplog.text
    assert "answers of 1 connections were not taken in time: closed" in caplog.text
