"""Peers: other ways to generate, behind the same route."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.client import Endpoint, new_record, send
from benchmarks.loadgen import run_load
from benchmarks.peers import peer_targets
from benchmarks.peers.front import Job, create_app, take_batch
from benchmarks.results import RequestRecord
from benchmarks.servers import RunningServer, Setup, Target
from benchmarks.workloads import PlannedRequest
from common.errors import StartupError
from tests.benchmarks.conftest import plan, planned


class Scripted:
    """A backend that counts, and fails where it is told to."""

    def serve(self, inbox: queue.Queue[Job]) -> None:
        while True:
            job = inbox.get()
            for token_id in range(job.max_tokens):
                job.emit(token_id)
            job.end(ValueError("no luck") if job.prompt[0] == 13 else None)


def ask(request: PlannedRequest) -> RequestRecord:
    """One request to the scripted peer, without a socket."""

    async def go() -> RequestRecord:
        transport = httpx.ASGITransport(create_app(Scripted(), "m", "scripted"))
        record = new_record(request)
        async with httpx.AsyncClient(transport=transport) as client:
            await send(client, Endpoint("http://peer", "m"), request, record, origin_s=time.monotonic())
        return record

    return asyncio.run(go())


def test_the_front_passes_tokens_on() -> None:
    record = ask(planned(0, tokens=5))
    assert record.error is None
    assert (len(record.token_times_s), record.completion_tokens, record.prompt_tokens_counted) == (5, 5, 3)
    assert record.finish_reason == "length"


def test_the_front_passes_errors_on() -> None:
    assert ask(planned(13, tokens=2)).error == "ValueError: no luck"


def test_the_front_takes_no_text() -> None:
    record = ask(PlannedRequest(0, 0.0, "text", 1, 1))
    assert record.error is not None
    assert "HTTP 400: this peer takes prompts as token ids only" in record.error


def test_batches_are_taken_as_static_batching_does() -> None:
    loop = asyncio.new_event_loop()
    inbox: queue.Queue[Job] = queue.Queue()
    for index in range(3):
        inbox.put(Job([index], 1, loop))
    assert [job.prompt for job in take_batch(inbox, 2)] == [[0], [1]]
    threading.Timer(0.01, inbox.put, (Job([9], 1, loop),)).start()
    assert [job.prompt for job in take_batch(inbox, 8, wait_s=1.0)[:2]] == [[2], [9]]
    loop.close()


def test_peers_are_found_by_name() -> None:
    setup = Setup(model="zoo:llama-tiny", slots=8)
    (generate,) = peer_targets("generate", setup)
    assert generate.options["model"] == "zoo:llama-tiny"
    assert [target.label for target in peer_targets("transformers", setup)] == [
        "transformers, one by one",
        "transformers, batches of 8",
        "transformers, continuous",
    ]
    assert len(peer_targets("transformers=continuous", setup)) == 1
    assert peer_targets("http://127.0.0.1:9", setup)[0].url == "http://127.0.0.1:9"
    orders = [target.order for name in ("generate", "transformers") for target in peer_targets(name, setup)]
    assert orders == sorted(orders)


def test_unknown_peers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nobody", "transformers=nothing"):
        with pytest.raises(StartupError, match="--peer"):
            peer_targets(name, Setup())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(StartupError, match="no llama-server on PATH"):
        peer_targets("llama.cpp=model.gguf", Setup())


def test_llama_cpp_gets_the_same_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (target,) = peer_targets("llama.cpp=model.gguf", Setup(slots=4, max_seq_len=1024))
    assert target.command[0] == str(program)
    assert (target.options["ctx-size"], target.options["parallel"]) == ("4096", "4")
    with pytest.raises(StartupError, match="name the model's file"):
        peer_targets("llama.cpp", Setup())


def measure(target: Target) -> list[RequestRecord]:
    with RunningServer(target) as server:
        requests = [PlannedRequest(i, 0.0, [5 + i, 9, 11] * (i + 1), 3 * (i + 1), 6 + i) for i in range(3)]
        records = run_load(plan(server.url, requests)).requests
    assert server.exit_code == 0
    return records


def test_our_own_loop_as_a_peer() -> None:
    (target,) = peer_targets("generate", Setup(model="zoo:llama-tiny"))
    records = measure(target)
    assert [record.error for record in records] == [None] * 3
    assert [len(record.token_times_s) for record in records] == [6, 7, 8]
    ends = sorted((record.token_times_s[0], record.token_times_s[-1]) for record in records)
    assert ends[0][1] <= ends[1][0]  # one after the other
    assert ends[1][1] <= ends[2][0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["single", "batch", "continuous"])
def test_transformers_as_a_peer(mode: str) -> None:
    (target,) = peer_targets(f"transformers={mode}", Setup(model="zoo:llama-tiny"))
    records = measure(target)
    assert [record.error for record in records] == [None] * 3
    assert [len(record.token_times_s) for record in records] == [6, 7, 8]
