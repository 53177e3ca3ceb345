"""One thread of the engine's process computes, and threads that hang keep no server."""

from __future__ import annotations

import httpx
import pytest

from tests.server.support import (
    HANG_S,
    ServerProcess,
    assert_error,
    engine_of,
    hold_a_full_batch,
    in_background,
)

PREFILL = "Once upon a time there was a brave fox. " * 60  # long enough for every product to be shared out


def threads_of_a_server(phase: str, workers: int, *flags: str) -> int:
    """Serve requests of several kinds with `workers` OpenMP threads. Returns the number of threads of the engine's
    process."""
    env = {"OMP_NUM_THREADS": str(workers), "OPENBLAS_NUM_THREADS": "1"}  # numpy has threads of its own
    with ServerProcess(phase, *flags, env=env) as server:
        server.complete(prompt=PREFILL, max_tokens=12, temperature=1, top_p=0.9, seed=4)
        server.complete(prompt=[PREFILL] * 4, logprobs=3, presence_penalty=1, stop=["fox"])
        server.events(prompt=PREFILL)
        assert server.client.get("/telemetry").status_code == 200
        return engine_of(server.process.pid).num_threads()


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
