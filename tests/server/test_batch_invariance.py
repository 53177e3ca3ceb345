"""`/version` and the log say whether the server is batch invariant, and it serves either way."""

from __future__ import annotations

import re

import pytest
import torch
from fastapi.testclient import TestClient

from common.hosting.local import LocalEngine
from common.server.app import create_app
from common.startup.phases import find_phase
from kernels import native

BODY = {"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True, "stream": False}


def start(caplog: pytest.LogCaptureFixture, **options: bool) -> tuple[bool, str]:
    """Build a server's engine and serve. Returns what /version says, and the log's line about the model."""
    caplog.set_level("INFO", "common.startup.build")
    package = find_phase("chunked")
    config = package.Config(model="zoo:llama-tiny", device="cpu", dtype="float32", max_seq_len=256, **options)
    with TestClient(create_app(LocalEngine(package.build_engine(config)))) as client:
        invariant: bool = client.get("/version").json()["batch_invariant"]
        assert client.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 5
    (line,) = (message for message in caplog.messages if message.startswith("loaded "))
    return invariant, line


def test_a_server_with_native_kernels_is_batch_invariant(caplog: pytest.LogCaptureFixture) -> None:
    if not native.is_loaded() or not native.has_products(torch.float32):
        pytest.skip("no native kernels here")
    invariant, line = start(caplog)
    assert re.fullmatch(r".*\(cpu, torch\.float32, native kernels, batch invariant\) in .* s", line)
    assert invariant


@pytest.mark.usefixtures("torch_kernels")
def test_a_server_with_torch_kernels_is_not_batch_invariant(caplog: pytest.LogCaptureFixture) -> None:
    invariant, line = start(caplog, native_kernels=False)
    assert "torch kernels, not batch invariant)" in line
    assert not invariant
