"""Overload, clients that leave, and shutdown, on servers whose forward passes the test holds."""

from __future__ import annotations

import signal
import socket
import struct
import time
from collections.abc import Callable

import httpx
import pytest

from tests.support.servers import (
    HANG_S,
    QUEUE,
    ServerProcess,
    assert_error,
    eventually,
    hold_a_full_batch,
    in_background,
    texts,
)

# ---------------------------------------------------------------------- the event loop is free


def test_the_server_answers_while_a_pass_runs(gated: ServerProcess) -> None:
    batch = hold_a_full_batch(gated)
    for _ in range(3):
        for path in ("/health", "/ready", "/v1/models", "/version", "/telemetry", "/openapi.json"):
            assert gated.client.get(path).status_code == 200
    assert_error(gated.post(prompt=""), 400, "prompt")
    assert not batch.done(), "all that was answered while the pass was held"
    gated.order("open")
    assert batch.result(HANG_S).status_code == 200


# ---------------------------------------------------------------------- overload


def test_overload_is_refused_exactly_and_costs_no_memory(gated: ServerProcess) -> None:
    memory: list[float] = []
    for _ in range(4):
        batch = hold_a_full_batch(gated)
        crowd = in_background(QUEUE + 10, lambda _: gated.post())
        eventually(lambda crowd=crowd: sum(each.done() for each in crowd) >= 10)
        refused = [each.result() for each in crowd if each.done()]
        assert len(refused) == 10, "the queue's places were all taken, and no more than that"
        for response in refused:
            assert_error(response, 503, None, "queue_full")
        assert gated.client.get("/health").status_code == 200
        gated.order("open")
        assert [each.result(HANG_S).status_code for each in crowd].count(200) == QUEUE
        assert batch.result(HANG_S).status_code == 200
        memory.append(gated.memory_mb())
    assert memory[-1] - memory[1] < 30, memory


def test_a_request_with_several_choices_is_taken_whole_or_not_at_all(gated: ServerProcess) -> None:
    batch = hold_a_full_batch(gated)
    waiting = in_background(1, lambda _: gated.post(n=QUEUE - 1))
    eventually(lambda: gated.queue_room() == 1)
    added = gated.counters()["requests_added"]
    assert_error(gated.post(prompt=["a", "b"]), 503, None, "queue_full")
    last = in_background(1, lambda _: gated.post())  # the refused request has not taken the last place
    eventually(lambda: gated.queue_room() == 0)
    assert gated.counters()["requests_added"] == added
    gated.order("open")
    for each in (batch, *waiting, *last):
        assert each.result(HANG_S).status_code == 200


def test_a_refusal_gives_its_place_back(gated: ServerProcess) -> None:
    """A place is held before the prompt is tokenized, and given back if the prompt is too long."""
    for _ in range(2 * QUEUE):
        assert_error(gated.post(prompt="word " * 5000), 422, "prompt")
        assert_error(gated.post(prompt=[10**6]), 400, "prompt")
    assert len(gated.complete(n=QUEUE, max_tokens=1)["choices"]) == QUEUE


# ---------------------------------------------------------------------- clients that leave


def _reset(connection: socket.socket) -> None:
    """Reset the connection, as the end of a killed process does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _half_close(connection: socket.socket) -> None:
    """Close the sending side, which the server takes for a client that leaves."""
    connection.shutdown(socket.SHUT_WR)


#: Ways in which a client leaves.
LEAVE: list[Callable[[socket.socket], None]] = [socket.socket.close, _reset, _half_close]


@pytest.mark.slow
def test_half_the_clients_vanish_and_the_others_complete(gated: ServerProcess) -> None:
    connections = [gated.raw(stream=True, max_tokens=1500, ignore_eos=True) for _ in range(4)]
    staying = in_background(
        4, lambda number: gated.events(max_tokens=80, ignore_eos=True, temperature=1, seed=number)
    )
    for number, connection in enumerate(connections):
        assert b"200 OK" in connection.recv(4096)
        LEAVE[number % len(LEAVE)](connection)
    answers = [each.result(HANG_S) for each in staying]
    for number, events in enumerate(answers):
        assert [name for name, _ in events] == ["token"] * 80 + ["done"]
        expected = gated.complete(max_tokens=80, ignore_eos=True, temperature=1, seed=number)
        assert texts(events)[0] == expected["choices"][0]["text"]
    eventually(lambda: gated.counters()["requests_cancelled"] == 4)
    assert gated.counters()["requests_finished"] == 8
    for connection in connections:
        connection.close()


# ---------------------------------------------------------------------- the end


def test_a_signal_lets_what_runs_finish(mortal: ServerProcess) -> None:
    batch = hold_a_full_batch(mortal)
    stream = in_background(1, lambda _: mortal.events(max_tokens=20, ignore_eos=True))[0]
    eventually(lambda: mortal.queue_room() == QUEUE - 1)
    mortal.signal()
    eventually(lambda: mortal.client.get("/ready").status_code == 503)
    assert_error(mortal.client.get("/ready"), 503, None, "shutting_down")
    health = mortal.client.get("/health")  # alive, though not ready
    assert (health.status_code, health.json()["status"]) == (200, "draining")
    assert mortal.client.post("/tokenize", json={"prompt": "Once"}).status_code == 200
    assert_error(mortal.post(), 503, None, "shutting_down")
    late = httpx.post(f"{mortal.url}/v1/completions", json=mortal.body(), timeout=HANG_S)  # a new connection
    assert_error(late, 503, None, "shutting_down")
    assert not batch.done()
    mortal.order("open")
    assert batch.result(HANG_S).status_code == 200
    assert [name for name, _ in stream.result(HANG_S)] == ["token"] * 20 + ["done"]
    assert mortal.wait() == 0
    assert "Traceback" not in mortal.log_text


def test_an_idle_server_ends_at_once_with_connections_open(mortal: ServerProcess) -> None:
    assert mortal.client.get("/health").status_code == 200  # kept alive by the client
    started = time.monotonic()
    mortal.signal()
    assert mortal.wait() == 0
    assert time.monotonic() - started < 20, "the shutdown timeout of 30 s is not waited for"
    *_, last = mortal.log_text.splitlines()
    assert "SIGTERM: finishing what runs" in last, "nothing is said after that, by no library either"


@pytest.mark.slow
def test_requests_beyond_the_shutdown_timeout_end_with_an_error(phase: str) -> None:
    options = ("--shutdown-timeout", "0.5", "--max-batch-size", "2")
    with ServerProcess(phase, *options, module="tests.support.gated_server") as server:
        with server.streaming(max_tokens=4000, ignore_eos=True) as events:
            next(events)
            whole = in_background(2, lambda _: server.post(max_tokens=4000, ignore_eos=True))
            eventually(lambda: server.counters()["requests_added"] == 3)
            server.signal()
            *_, (name, data) = events
        assert (name, data["error"]["code"]) == ("error", "shutting_down")
        for each in whole:
            assert_error(each.result(HANG_S), 503, None, "shutting_down")
        assert server.wait() == 0
        assert "Traceback" not in server.log_text


@pytest.mark.slow
def test_a_second_signal_ends_the_server_now(mortal: ServerProcess) -> None:
    batch = hold_a_full_batch(mortal)
    mortal.forget_log()
    mortal.signal(signal.SIGINT)
    eventually(lambda: mortal.client.get("/ready").status_code == 503)
    mortal.signal(signal.SIGINT)
    assert mortal.wait() == 1
    first, second = mortal.log_text.splitlines()
    assert first.endswith(
        "INFO    SIGINT: finishing what runs, for up to 30 s; a second signal ends it at once"
    )
    assert second.endswith("WARNING SIGINT again: exiting now")
    # The client sees the end of its connection, or an answer with status 500.
    assert batch.exception(HANG_S) is not None or batch.result().status_code == 500


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_given_up(phase: str) -> None:
    slow = {"max_tokens": 4000, "ignore_eos": True, "n": 4}
    with ServerProcess(phase, "--max-seq-len", "4096", "--request-timeout", "0.2") as server:
        events = server.events(**slow)
        assert {name for name, _ in events} <= {"token", "error"}
        failures = [data for name, data in events if name == "error"]
        assert [each["error"]["code"] for each in failures] == ["request_timeout"] * 4
        assert_error(server.post(**slow), 504, None, "request_timeout")
        server.assert_serves()
        counters = server.counters()
        assert counters["requests_failed"] + counters["requests_cancelled"] == 8
