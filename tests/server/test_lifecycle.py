"""Load, clients that leave, failures, and the end: on servers whose forward passes the test holds."""

from __future__ import annotations

import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import psutil
import pytest

from tests.server.gated_server import SECRET
from tests.server.support import HANG_S, ServerProcess, assert_error, eventually, texts

BATCH, QUEUE = 4, 6  # as the fixture starts it


def in_background(count: int, ask: Callable[[int], Any]) -> list[Future[Any]]:
    """Ask that often at once."""
    pool = ThreadPoolExecutor(count)
    together = threading.Barrier(count)

    def wait_and_ask(number: int) -> Any:
        together.wait(HANG_S)
        return ask(number)

    return [pool.submit(wait_and_ask, number) for number in range(count)]


def hold_a_full_batch(server: ServerProcess, **fields: Any) -> Future[httpx.Response]:
    """Submit as many sequences as are computed together, and hold their first pass."""
    server.order("hold")
    server.forget_output()
    (batch,) = in_background(1, lambda _: post(server, prompt=["Once"] * BATCH, **fields))
    server.expect("held")
    return batch


def are_done(crowd: list[Future[Any]], count: int) -> bool:
    return sum(each.done() for each in crowd) >= count


def post(server: ServerProcess, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/completions", json=server.body(**({"stream": False} | fields)), timeout=HANG_S
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


def test_the_garbage_collector_has_little_to_look_through(gated: ServerProcess) -> None:
    """It would hold up a step for longer than most take."""
    assert gated.complete()["usage"]["completion_tokens"] > 0
    gated.order("collect")
    gated.expect("few")


def test_overload_is_refused_exactly_and_costs_no_memory(gated: ServerProcess) -> None:
    memory: list[float] = []
    for _ in range(4):
        batch = hold_a_full_batch(gated)
        crowd = in_background(QUEUE + 10, lambda _: post(gated))
        eventually(partial(are_done, crowd, 10))
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
    waiting = in_background(1, lambda _: post(gated, n=QUEUE - 1))
    eventually(lambda: gated.queue_room() == 1)
    added = gated.counters()["requests_added"]
    assert_error(gated.post(prompt=["a", "b"]), 503, None, "queue_full")
    last = in_background(1, lambda _: post(gated))  # one place is left, and it is still there
    eventually(lambda: gated.queue_room() == 0)
    assert gated.counters()["requests_added"] == added
    gated.order("open")
    for each in (batch, *waiting, *last):
        assert each.result(HANG_S).status_code == 200


def test_a_refusal_gives_its_place_back(gated: ServerProcess) -> None:
    """Places are promised before tokenizing; a prompt that proves too long does not keep its own."""
    for _ in range(2 * QUEUE):
        assert_error(gated.post(prompt="word " * 5000), 422, "prompt")
        assert_error(gated.post(prompt=[10**6]), 400, "prompt")
    assert len(gated.complete(n=QUEUE, max_tokens=1)["choices"]) == QUEUE


# ---------------------------------------------------------------------- clients that leave


def reset(connection: socket.socket) -> None:
    """Leave as a process does that is killed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    """Stop sending; over HTTP/1.1 that is leaving."""
    connection.shutdown(socket.SHUT_WR)


LEAVE = [socket.socket.close, reset, half_close]


def test_half_the_clients_vanish_and_the_others_complete(gated: ServerProcess) -> None:
    connections = [gated.raw(stream=True, max_tokens=1500, ignore_eos=True) for _ in range(4)]
    staying = in_background(
        4, lambda number: gated.events(max_tokens=300, ignore_eos=True, temperature=1, seed=number)
    )
    for connection in connections:
        assert b"200 OK" in connection.recv(4096)
    eventually(lambda: gated.counters()["requests_added"] == 8)
    for number, connection in enumerate(connections):
        LEAVE[number % len(LEAVE)](connection)
    answers = [each.result(HANG_S) for each in staying]
    for number, events in enumerate(answers):
        assert [name for name, _ in events] == ["token"] * 300 + ["done"]
        expected = gated.complete(max_tokens=300, ignore_eos=True, temperature=1, seed=number)
        assert texts(events)[0] == expected["choices"][0]["text"]
    eventually(lambda: gated.counters()["requests_cancelled"] == 4)
    assert gated.counters()["requests_finished"] == 8
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("leave", LEAVE, ids=lambda leave: leave.__name__)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_leaves_while_waiting(
    gated: ServerProcess, stream: bool, leave: Callable[[Any], Any]
) -> None:
    batch = hold_a_full_batch(gated)
    connections = [gated.raw(stream=stream, max_tokens=1000, ignore_eos=True) for _ in range(QUEUE)]
    eventually(lambda: gated.queue_room() == 0)
    for connection in connections:
        leave(connection)
    gated.order("open")
    assert batch.result(HANG_S).status_code == 200
    # A place is held before its request is tokenized: one that was left in between never came to the engine.
    dropped = "dropped: the client left"
    eventually(lambda: gated.counters()["requests_cancelled"] + gated.log_text.count(dropped) == QUEUE)
    counters = gated.counters()
    assert counters["requests_finished"] == BATCH
    assert counters["decode_tokens"] < 1000, "what nobody waits for was computed"
    assert gated.complete()["usage"]["completion_tokens"] > 0
    for connection in connections:
        connection.close()


def test_a_client_leaves_before_its_whole_answer_is_made(gated: ServerProcess) -> None:
    """Nothing is sent before the end of a JSON answer: only watching the connection tells."""
    connection = gated.raw(stream=False, max_tokens=3000, ignore_eos=True)
    eventually(lambda: gated.counters()["decode_tokens"] > 3)
    connection.close()
    eventually(lambda: gated.counters()["requests_cancelled"] == 1)
    assert gated.counters()["requests_finished"] == 0
    assert gated.complete()["usage"]["completion_tokens"] > 0
    eventually(lambda: gated.client.get("/telemetry").json()["steps"][-1]["kv_reserved_tokens"] == 0)


def test_a_client_leaves_in_the_middle_of_its_body(gated: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", gated.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
    assert gated.complete()["usage"]["completion_tokens"] > 0
    assert "Traceback" not in gated.log_text


@pytest.mark.slow
def test_readers_that_stall_are_dropped_and_cost_no_memory(gated: ServerProcess) -> None:
    """Two seconds without reading anything is a stall, to this server. Buffers are small (see `gated_server`)."""
    process = psutil.Process(gated.process.pid)
    files, memory = process.num_fds(), []
    for _ in range(3):
        stalled = [gated.raw(stream=True, max_tokens=1500, ignore_eos=True) for _ in range(BATCH)]
        with gated.streaming(max_tokens=100, ignore_eos=True, temperature=1) as events:
            assert [name for name, _ in events][-1] == "done", "the others do not wait for them"
        eventually(lambda: process.num_fds() <= files)
        memory.append(gated.memory_mb())
        for connection in stalled:
            connection.close()
    assert memory[-1] - memory[0] < 30, memory
    assert gated.complete()["usage"]["completion_tokens"] > 0
    assert "Traceback" not in gated.log_text


# ---------------------------------------------------------------------- failures


def test_a_pass_that_raises_fails_its_requests_and_no_others(gated: ServerProcess) -> None:
    gated.order("fail")
    response = gated.post()
    assert_error(response, 500, None, "internal_error")
    gated.order("heal")
    with gated.streaming(max_tokens=2000, ignore_eos=True, n=2) as events:
        first = [next(events) for _ in range(4)]
        gated.order("fail")
        rest = list(events)
    gated.order("heal")
    assert {name for name, _ in first} == {"token"}
    errors = [data for name, data in rest if name != "token"]
    assert [name for name, _ in rest if name != "token"] == ["error"] * 2
    assert sorted(data["choices"][0]["index"] for data in errors) == [0, 1]
    for data in errors:
        assert set(data["error"]) == {"message", "type", "param", "code"}
        assert SECRET not in str(data)
    assert SECRET not in response.text
    assert SECRET in gated.log_text, "the log says what the client is not told"
    assert gated.complete()["usage"]["completion_tokens"] > 0
    assert gated.client.get("/health").status_code == 200


def test_an_error_event_of_a_single_choice_holds_the_error_alone(gated: ServerProcess) -> None:
    gated.order("fail")
    ((name, data),) = gated.events()
    assert name == "error"
    assert data == {
        "error": {
            "message": "the server failed on this request",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }


def test_logits_that_are_not_numbers(gated: ServerProcess) -> None:
    gated.order("nan")
    assert_error(gated.post(), 500, None, "nan_logits")
    gated.order("heal")
    assert gated.complete()["usage"]["completion_tokens"] > 0


def test_a_dead_device_answers_everyone_and_health_says_so(mortal: ServerProcess) -> None:
    batch = hold_a_full_batch(mortal)
    waiting = in_background(3, lambda _: post(mortal))
    streaming = in_background(2, lambda _: mortal.events())
    eventually(lambda: mortal.queue_room() == QUEUE - 5)
    mortal.order("die")
    mortal.order("open")
    for each in (batch, *waiting):
        assert_error(each.result(HANG_S), 503, None, "engine_dead")
    for stream in streaming:
        ((name, data),) = stream.result(HANG_S)
        assert (name, data["error"]["code"]) == ("error", "engine_dead")
    for path in ("/health", "/ready"):
        assert_error(mortal.client.get(path), 503, None, "engine_dead")
    assert_error(mortal.post(), 503, None, "engine_dead")
    assert mortal.client.get("/v1/models").status_code == 200
    mortal.signal()
    assert mortal.wait() == 0


# ---------------------------------------------------------------------- the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_finish(mortal: ServerProcess, number: signal.Signals) -> None:
    batch = hold_a_full_batch(mortal)
    stream = in_background(1, lambda _: mortal.events(max_tokens=20, ignore_eos=True))[0]
    eventually(lambda: mortal.queue_room() == QUEUE - 1)
    mortal.signal(number)
    eventually(lambda: mortal.client.get("/ready").status_code == 503)
    assert_error(mortal.client.get("/ready"), 503, None, "shutting_down")
    health = mortal.client.get("/health")  # alive, though not ready
    assert (health.status_code, health.json()["status"]) == (200, "draining")
    assert mortal.client.post("/tokenize", json={"prompt": "Once"}).status_code == 200
    assert_error(mortal.post(), 503, None, "shutting_down")  # the listener is open all the while
    assert_error(post(mortal), 503, None, "shutting_down")
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
    mortal.read_the_rest()
    *_, last = mortal.log_text.splitlines()
    assert "SIGTERM: finishing what runs" in last, "nothing is said after that, by no library either"


def test_what_is_not_done_in_time_ends_with_an_error(phase: str) -> None:
    server = ServerProcess(
        phase,
        *("--shutdown-timeout", "0.5", "--max-batch-size", "2"),
        module="tests.server.gated_server",
    )
    try:
        with server.streaming(max_tokens=4000, ignore_eos=True) as events:
            next(events)
            whole = in_background(2, lambda _: post(server, max_tokens=4000, ignore_eos=True))
            eventually(lambda: server.counters()["requests_added"] == 3)
            server.signal()
            *_, (name, data) = events
        assert (name, data["error"]["code"]) == ("error", "shutting_down")
        for each in whole:
            assert_error(each.result(HANG_S), 503, None, "shutting_down")
        assert server.wait() == 0
        assert "Traceback" not in server.log_text
    finally:
        server.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_now(mortal: ServerProcess, number: signal.Signals) -> None:
    batch = hold_a_full_batch(mortal)
    mortal.forget_log()
    mortal.signal(number)
    eventually(lambda: mortal.client.get("/ready").status_code == 503)
    mortal.signal(number)
    assert mortal.wait() == 1
    mortal.read_the_rest()
    first, second = mortal.log_text.splitlines()
    assert first.endswith(
        f"INFO    {number.name}: finishing what runs, for up to 30 s; a second signal ends it at once"
    )
    assert second.endswith(f"WARNING {number.name} again: exiting now")
    # The client sees its connection end, or the HTTP server's last word.
    assert batch.exception(HANG_S) is not None or batch.result().status_code == 500


def test_a_signal_while_a_stalled_reader_is_connected(mortal: ServerProcess) -> None:
    with mortal.raw(stream=True, max_tokens=1500, ignore_eos=True):
        eventually(lambda: mortal.counters()["decode_tokens"] > 10)
        mortal.signal()
        assert mortal.wait() == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_is_given_up(phase: str, stream: bool) -> None:
    """In a stream after what it had, else as a status; the next one is served."""
    server = ServerProcess(phase, "--max-seq-len", "1024", "--request-timeout", "0.2")
    slow = {"max_tokens": 1000, "ignore_eos": True, "n": 4}
    if stream:
        events = server.events(**slow)
        assert {name for name, _ in events} == {"token", "error"}
        failures = [data for name, data in events if name == "error"]
        assert [each["error"]["code"] for each in failures] == ["request_timeout"] * 4
    else:
        assert_error(server.post(**slow), 504, None, "request_timeout")
    assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
    counters = server.counters()
    assert (
        counters["requests_failed"] >= 1
    )  # with one choice a whole answer is lost, and the others are given up
    assert counters["requests_failed"] + counters["requests_cancelled"] == 4
    server.close()
