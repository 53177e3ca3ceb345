"""One thread of the process computes, from loading the model to the last token."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from tests.server.support import HANG_S, ServerProcess, assert_error, hold_a_full_batch, in_background

PREFILL = "Once upon a time there was a brave fox. " * 60  # long enough for every product to be shared out


def threads_of_a_server(phase: str, workers: int, *flags: str) -> int:
    """Serve requests of several kinds with `workers` OpenMP threads. Returns the process's number of threads."""
    env = {"OMP_NUM_THREADS": str(workers), "OPENBLAS_NUM_THREADS": "1"}  # numpy has threads of its own
    with ServerProcess(phase, *flags, env=env) as server:
        server.complete(prompt=PREFILL, max_tokens=12, temperature=1, top_p=0.9, seed=4)
        server.complete(prompt=[PREFILL] * 4, logprobs=3, presence_penalty=1, stop=["fox"])
        server.events(prompt=PREFILL)
        assert server.client.get("/telemetry").status_code == 200
        return psutil.Process(server.process.pid).num_threads()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("served", "flag"), [("phase7_chunked", None), ("phase9_pipelined", "--pass-threads")]
)
def test_libgomp_keeps_one_pool_of_workers(served: str, flag: str | None) -> None:
    """A second computing thread would start a second pool of workers, and every pass would take twice as long."""
    two, one = (threads_of_a_server(served, n, *([flag, str(n)] if flag else [])) for n in (2, 1))
    assert two - one == 1


@pytest.mark.slow
def test_a_step_that_hangs_does_not_keep_the_server() -> None:
    """The clients get an error and the process ends, although the pass never ends."""
    with ServerProcess(
        "phase7_chunked",
        *("--shutdown-timeout", "0.2", "--max-batch-size", "4"),
        module="tests.server.gated_server",
    ) as server:
        batch = hold_a_full_batch(server)
        server.signal()
        assert_error(batch.result(HANG_S), 503, None, "shutting_down")
        assert server.wait() == 0
        assert "Traceback" not in server.log_text


def test_a_thread_that_hangs_does_not_keep_the_server() -> None:
    """A thread that works for a request cannot be interrupted. The process ends without waiting for it."""
    with ServerProcess(
        "phase5_continuous", "--shutdown-timeout", "0.2", module="tests.server.gated_server"
    ) as server:
        server.order("stick")
        (stuck,) = in_background(1, lambda _: server.client.post("/tokenize", json={"prompt": "a hat"}))
        server.expect("hangs")
        server.signal()
        assert server.wait() == 0
        assert isinstance(stuck.exception(HANG_S), httpx.TransportError)
        assert "Traceback" not in server.log_text


#: A program that serves and runs `{builds}` instead of building an engine.
BUILDING = """
import sys, types
import torch
from common.server import run as serve

def build_engine(config):
    print("building", flush=True)
    {builds}

package = serve.find_phase("phase4_static")
own = types.SimpleNamespace(PHASE=package.PHASE, Config=package.Config, build_engine=build_engine)
serve.find_phase = lambda name: own
serve.main("phase4_static", ["--port", "0"])
"""


def test_an_interrupt_while_the_engine_is_built() -> None:
    """The thread that builds the engine keeps running inside torch. The process ends anyway, with one line."""
    script = BUILDING.format(builds="while True: torch.ones(500, 500) @ torch.ones(500, 500)")
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=HANG_S)
    finally:
        process.kill()  # in case it still computes
    assert (process.returncode, log) == (130, "interrupted\n")


def test_a_mistake_while_the_engine_is_built_ends_the_process() -> None:
    script = BUILDING.format(builds="raise ValueError('a mistake')")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: a mistake")
