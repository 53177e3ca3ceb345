"""Faults of the system that a server runs on. They do not reach the engine, so one phase is enough.

The end by a signal is in `tests/server/test_lifecycle.py`, the end of the engine's process in
`tests/server/test_processes.py`, a failed pass in `tests/server/test_failures.py`, and a port in use in
`tests/server/test_cli.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from common.server.http.sockets import allow_open_files, bind
from tests.support.servers import HANG_S, ServerProcess, app_with, eventually, in_background

FULL_DISK = Path("/dev/full")
PHASE = "phase9_pipelined"


@pytest.mark.slow
def test_a_killed_server_starts_again_on_its_port() -> None:
    """The port is free at once, although connections of the killed server are not closed yet."""
    with ServerProcess(PHASE) as first:
        text = first.text()
        (interrupted,) = in_background(1, lambda _: first.events(max_tokens=4000, ignore_eos=True))
        eventually(lambda: first.counters()["decode_tokens"] > 20)
        first.process.kill()
        assert first.process.wait(HANG_S) == -9
        assert isinstance(interrupted.exception(HANG_S), httpx.TransportError)
        with ServerProcess(PHASE, "--port", str(first.port)) as second:
            assert second.port == first.port
            assert second.text() == text


@pytest.mark.slow
@pytest.mark.skipif(not FULL_DISK.exists(), reason="there is no /dev/full")
def test_a_full_disk_for_the_log() -> None:
    """Requests are served without a log, and the server ends normally."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", PHASE, "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with FULL_DISK.open("w") as disk:
        process = subprocess.Popen(command, stderr=disk)
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S))
        eventually(lambda: is_ready(client))
        body = {"model": "zoo:llama-tiny", "prompt": "Once", "max_tokens": 5, "stream": False}
        for wanted in (body, body | {"temperature": -1}, body):
            assert client.post("/v1/completions", json=wanted).status_code in (200, 422)
        process.terminate()
        assert process.wait(HANG_S) == 0


def is_ready(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/ready").status_code == 200
    return False


def test_a_clock_that_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day jumps backwards and forwards. Waiting uses the monotonic clock."""
    days, real = itertools.cycle([-1000, 1000, -1, 0]), time.time
    with app_with() as client:
        monkeypatch.setattr(time, "time", lambda: real() + 86400 * next(days))
        for _ in range(4):
            body = {"prompt": "Once", "max_tokens": 3, "stream": False}
            assert isinstance(client.post("/v1/completions", json=body).json()["created"], int)
        assert client.get("/metrics").status_code == 200


@pytest.mark.slow
def test_a_thousand_idle_connections() -> None:
    count = 1000
    if allow_open_files(count) < count:  # this process has the clients' ends
        pytest.skip("this process may not have as many open files")
    with ServerProcess(PHASE) as server, contextlib.ExitStack() as idle:
        for _ in range(count):
            idle.enter_context(server.connect())
        server.assert_serves()
        assert server.client.get("/health").status_code == 200
