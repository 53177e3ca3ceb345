"""Faults of the whole server, and of the system that it runs on.

| fault | test |
| --- | --- |
| SIGTERM: streaming, with a slow reader | `test_the_end_comes_while_answers_are_streamed` |
| SIGTERM: prefilling | `test_a_signal_lets_what_runs_finish` of `tests/server/test_lifecycle.py` |
| SIGTERM: idle | `test_an_idle_server_ends_at_once_with_connections_open` of the same |
| SIGTERM twice | `test_a_second_signal_ends_it_now` of the same |
| SIGKILL and restart on the same port | `test_killed_and_started_again` |
| disk full for logs | `test_a_full_disk_for_the_log` |
| clock jump | `test_a_clock_that_jumps` |
| port in use | `test_a_port_in_use_is_found_before_the_model_is_loaded` of `tests/server/test_cli.py` |
| engine thread dies | `test_an_engine_that_dies` |
| event loop blocked for a second | `test_an_event_loop_that_is_blocked` |
| 1,000 idle connections | `test_a_thousand_idle_connections` |

The faults of one request are in `test_requests.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from common.server.http.connections import ConnectionLimits
from common.server.http.sockets import allow_open_files, bind
from tests.faults import breaking
from tests.faults.breaking import MARKED
from tests.faults.conftest import options_of
from tests.faults.neighbours import PROMPTS, Neighbours
from tests.server.support import (
    HANG_S,
    LocalServer,
    ServerProcess,
    assert_error,
    eventually,
    in_background,
    on_phases,
    post,
)

FULL_DISK = Path("/dev/full")
ON_ONE = on_phases("phase9_pipelined")  # these faults do not reach the engine


@pytest.fixture
def mortal(phase: str) -> Iterator[LocalServer]:
    """A server for one test only, which may end it."""
    server = LocalServer(phase, **options_of(phase))
    yield server
    server.close()


def both_decode(server: LocalServer) -> bool:
    """Return whether two requests were added and decode."""
    counters = server.counters()
    return counters["requests_added"] == 2 and counters["decode_tokens"] > 4


# ---------------------------------------------------------------------- signals


@pytest.mark.slow
def test_the_end_comes_while_answers_are_streamed(mortal: LocalServer) -> None:
    """Clients whose answers began before the signal get them whole, whether they read fast or slowly."""
    running = in_background(2, lambda _: mortal.events(max_tokens=200, ignore_eos=True))
    eventually(lambda: both_decode(mortal))
    with mortal.raw(stream=True, max_tokens=300, ignore_eos=True) as slow, slow.makefile("rb") as answer:
        eventually(lambda: mortal.counters()["requests_added"] == 3)
        mortal.signal()
        for each in running:
            assert each.result(HANG_S)[-1][0] == "done"
        assert b"event: done" in answer.read()
        eventually(lambda: mortal.ended)
    assert not mortal.worker.running


@pytest.mark.slow
@ON_ONE
def test_killed_and_started_again(phase: str) -> None:
    """The port is free at once, although connections of the killed server are not closed yet."""
    first = ServerProcess(phase)
    with contextlib.ExitStack() as stack:
        stack.callback(first.close)
        text = first.complete(prompt=PROMPTS[0])["choices"][0]["text"]
        (interrupted,) = in_background(1, lambda _: first.events(max_tokens=4000, ignore_eos=True))
        eventually(lambda: first.counters()["decode_tokens"] > 4)
        first.process.kill()
        assert first.wait() == -9
        assert isinstance(interrupted.exception(HANG_S), httpx.TransportError)
        second = ServerProcess(phase, "--port", str(first.port))
        stack.callback(second.close)
        assert second.port == first.port
        assert second.complete(prompt=PROMPTS[0])["choices"][0]["text"] == text


# ---------------------------------------------------------------------- the system


@pytest.mark.slow
@ON_ONE
@pytest.mark.skipif(not FULL_DISK.exists(), reason="there is no /dev/full")
def test_a_full_disk_for_the_log(phase: str) -> None:
    """Requests are served without a log, and the server ends normally."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", phase, "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with FULL_DISK.open("w") as disk:
        process = subprocess.Popen(command, stderr=disk)
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S))
        eventually(lambda: answers(client))
        body = {"model": "zoo:llama-tiny", "prompt": "Once", "max_tokens": 5, "stream": False}
        for wanted in (body, body | {"temperature": -1}, body):
            assert client.post("/v1/completions", json=wanted).status_code in (200, 422)
        process.terminate()
        assert process.wait(HANG_S) == 0


def answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/ready").status_code == 200
    return False


@pytest.mark.slow
@ON_ONE
def test_a_clock_that_jumps(
    server: LocalServer, neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of day jumps backwards and forwards. Waiting uses the monotonic clock."""
    days, real = itertools.cycle([-1000, 1000, -1, 0]), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86400 * next(days))
    for _ in range(4):
        answer = server.complete(max_tokens=3)
        assert isinstance(answer["created"], int)
    assert server.client.get("/metrics").status_code == 200


@pytest.mark.slow
@ON_ONE
def test_an_event_loop_that_is_blocked(server: LocalServer, neighbours: Neighbours) -> None:
    loop = server.http._loop
    assert loop is not None
    loop.call_soon_threadsafe(time.sleep, 1)
    assert server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


@pytest.mark.slow
@ON_ONE
def test_a_thousand_idle_connections(server: LocalServer, neighbours: Neighbours) -> None:
    count = 1000
    if allow_open_files(2 * count) < 2 * count:  # this process has both ends
        pytest.skip("this process may not have as many open files")
    assert ConnectionLimits().connections > count
    with contextlib.ExitStack() as idle:
        for _ in range(count):
            idle.enter_context(server.connect())
        eventually(lambda: len(server.http.server_state.connections) >= count)
        assert server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
        assert server.client.get("/health").status_code == 200
    eventually(lambda: len(server.http.server_state.connections) < 20)


# ---------------------------------------------------------------------- the engine's thread


@pytest.mark.parametrize("error", [SystemExit("out of here"), torch.AcceleratorError("gone")], ids=repr)
def test_an_engine_that_dies(mortal: LocalServer, error: BaseException) -> None:
    """The engine or the device fails. All clients, also later ones, get an error. The server can be stopped."""
    gate, die = breaking.Gate(20), breaking.raising(error, 20)

    def before(count: int) -> None:
        gate(count)
        die(count)

    with breaking.passes(mortal, before=before):
        streams = in_background(2, lambda _: mortal.post(**MARKED | {"max_tokens": 900, "stream": True}))
        gate.wait()
        waiting = in_background(2, lambda _: post(mortal))
        eventually(lambda: mortal.worker.num_waiting() >= len(waiting))
        gate.open()
        for each in waiting:
            assert_error(each.result(HANG_S), 503, None, "engine_dead")
    ends = [each.result(HANG_S) for each in streams]
    assert 200 in {end.status_code for end in ends}  # the other may have had no token before the end
    for end in ends:
        assert json.loads(end.text.rpartition("data: ")[2])["error"]["code"] == "engine_dead"
    assert_error(mortal.client.get("/health"), 503, None, "engine_dead")
    assert_error(mortal.client.get("/ready"), 503, None, "engine_dead")
    assert_error(mortal.post(), 503, None, "engine_dead")
    for path in ("/v1/models", "/version", "/metrics"):
        assert mortal.client.get(path).status_code == 200
    mortal.signal()
    eventually(lambda: mortal.ended)
