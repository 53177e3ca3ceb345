"""Peers: other ways to generate, behind the same route."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import queue
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks.client import Endpoint, new_record, send
from benchmarks.loadgen import run_load
from benchmarks.peers import vllm_server
from benchmarks.peers.environments import LIBRARIES
from benchmarks.peers.front import Job, create_app, take_batch
from benchmarks.peers.registry import peer_targets
from benchmarks.results import RequestRecord
from benchmarks.servers import RunningServer, Setup, Target, phase_target
from benchmarks.workloads import PlannedRequest
from common.errors import StartupError
from common.kv import KVShape
from common.models.registry import open_checkpoint
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


def test_unknown_peers_are_refused() -> None:
    for name in ("nobody", "transformers=nothing"):
        with pytest.raises(StartupError, match="--peer"):
            peer_targets(name, Setup())


def environment_at(folder: Path) -> Path:
    """Something that looks like a virtual environment: this one's python, without packages of its own."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment in which every library of `LIBRARIES` seems to be installed."""
    for name, library in list(LIBRARIES.items()):
        monkeypatch.setitem(LIBRARIES, name, dataclasses.replace(library, packages=("torch",)))
    return environment_at(tmp_path / "env")


@pytest.mark.parametrize("peer", LIBRARIES)
def test_a_peer_that_is_not_installed_is_one_line(
    peer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, broken = environment_at(tmp_path / "empty"), environment_at(tmp_path / "broken")
    (broken / "bin" / "python").write_text("not a program")
    (tmp_path / "no-rights" / "bin").mkdir(parents=True)
    (tmp_path / "no-rights" / "bin" / "python").write_text("")
    for argument, said in (
        ("", "name the virtual environment"),
        (f"={tmp_path / 'nowhere'}", "no bin/python"),
        (f"={empty}", "not installed"),
        (f"={broken}", "does not run"),
        (f"={tmp_path / 'no-rights'}", "does not run"),
    ):
        with pytest.raises(StartupError, match=said) as refusal:
            peer_targets(f"{peer}{argument}", Setup(device="cpu"))
        assert f"--peer {peer}" in str(refusal.value)
        assert "\n" not in str(refusal.value)
    with pytest.raises(StartupError, match=LIBRARIES[peer].packages[0]):
        peer_targets(peer, Setup())
    # Both programs say it before they start anything.
    assert command_line.main(["compare", "--peer", f"{peer}={empty}", "--phases", "4"]) == 2
    assert command_line.main(["micro", "decode_step", "--peer", f"{peer}={empty}"]) == 2
    assert capsys.readouterr().err.count("not installed") == 2


def test_a_library_gets_the_memory_of_the_paged_phases(installed: Path) -> None:
    setup = Setup(slots=4, max_seq_len=1024, device="cpu")
    paged = phase_target("6", setup).options
    tokens = int(paged["num-blocks"]) * int(paged["block-size"])
    for peer in ("openvino", "llama.cpp"):
        (target,) = peer_targets(f"{peer}={installed}", setup)
        assert int(target.options["kv-tokens"]) == tokens == 4096
        assert target.options["max-batch-size"] == paged["max-batch-size"]
        assert target.options["max-seq-len"] == "1024"
    (vllm,) = peer_targets(f"vllm={installed}", setup)
    assert int(vllm.options["kv-tokens"]) == tokens
    assert vllm.options["max-num-seqs"] == paged["max-batch-size"]
    assert vllm.options["max-model-len"] == "1024"
    assert "--enable-prefix-caching" in vllm.command


def test_results_keep_no_folder_of_the_users(installed: Path) -> None:
    for peer in LIBRARIES:
        (target,) = peer_targets(f"{peer}={installed}", Setup(device="cpu"))
        assert str(installed) in target.command
        assert str(installed) not in " ".join(target.options.values())


def test_peers_stand_in_one_order(installed: Path) -> None:
    names = ["generate", "transformers", *(f"{peer}={installed}" for peer in LIBRARIES), "http://127.0.0.1:9"]
    orders = [target.order for name in names for target in peer_targets(name, Setup(device="cpu"))]
    assert orders == sorted(orders)
    assert len(set(orders)) == len(orders)


def test_vllm_is_served_the_weights_and_bytes_of_the_phases(
    installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The program that becomes vLLM's server is stopped where it would."""
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: became.append(command))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    setup = Setup(model="zoo:llama-tiny", dtype="float32", slots=4, max_seq_len=256, device="cpu")
    (target,) = peer_targets(f"vllm={installed}", setup)
    monkeypatch.setattr(sys, "argv", target.command[2:])
    vllm_server.main()
    (command,) = became
    assert command[0] == str(installed / "bin" / "python")
    options = dict(itertools.pairwise(command))
    shape = KVShape.of(open_checkpoint("zoo:llama-tiny").config, torch.float32)
    assert int(options["--kv-cache-memory-bytes"]) == 4 * 256 * shape.bytes_per_token
    assert options["--model"] == str(open_checkpoint("zoo:llama-tiny").weights)
    assert options["--dtype"] == "float32"
    assert options["--max-model-len"] == "256"
    assert "--kv-tokens" not in command  # no option of vLLM's


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


INSTALLED_PEERS = [name for name in os.environ.get("INFER_TEST_PEERS", "").split(",") if name]


@pytest.mark.slow
@pytest.mark.skipif(
    not INSTALLED_PEERS, reason="INFER_TEST_PEERS names none, such as vllm=FOLDER,openvino=FOLDER"
)
@pytest.mark.parametrize("peer", INSTALLED_PEERS)
def test_a_peer_in_an_environment_of_its_own(peer: str) -> None:
    setup = Setup(model="dummy:llama-60m", dtype="bfloat16", slots=2, max_seq_len=256, device="cpu")
    (target,) = peer_targets(peer, setup)
    records = measure(target)
    assert [record.error for record in records] == [None] * 3
    assert [record.completion_tokens for record in records] == [6, 7, 8]
