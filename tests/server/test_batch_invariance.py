"""`/version` and the log say whether the server is batch invariant, and it serves either way."""

from __future__ import annotations

import re

import pytest
import torch
from fastapi.testclient import TestClient

from common.engine.engine import Engine
from common.server.app import create_app
from common.startup.phases import find_phase
from kernels import native

BODY = {
    "model": "zoo:llama-tiny",
    "prompt": "Once upon a time",
    "max_tokens": 5,
    "temperature": 0,
    "stream": False,
}


def start(caplog: pytest.LogCaptureFixture, **options: bool) -> tuple[Engine, str]:
    """Build a server's engine. Returns it, and the log's line about its model."""
    caplog.set_level("INFO", "common.startup.build")
    package = find_phase("chunked")
    config = package.Config(model="zoo:llama-tiny", device="cpu", dtype="float32", max_seq_len=256, **options)
    engine = package.build_engine(config)
    said = (record.getMessage() for record in caplog.records if record.name == "common.startup.build")
    (line,) = (line for line in said if line.startswith("loaded "))
    return engine, line


def ask(engine: Engine) -> tuple[bool, str]:
    """Return `batch_invariant` of /version, and the text of an answer."""
    with TestClient(create_app(engine)) as client:
        said = client.get("/version").json()["batch_invariant"]
        answers = [client.post("/v1/completions", json=BODY).json() for _ in range(2)]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [5, 5]
    text: str = answers[1]["choices"][0]["text"]
    return said, text


def test_a_server_with_native_kernels_is_batch_invariant(caplog: pytest.LogCaptureFixture) -> None:
    if not native.is_loaded() or not native.has_products(torch.float32):
        pytest.skip("no native kernels here")
    engine, line = start(caplog)
    assert re.fullmatch(r".*\(cpu, torch\.float32, native kernels, batch invariant\) in .* s", line)
    assert ask(engine)[0] is True


@pytest.mark.usefixtures("torch_kernels")
def test_a_server_with_torch_kernels_is_not_batch_invariant(caplog: pytest.LogCaptureFixture) -> None:
    engine, line = start(caplog, native_kernels=False)
    assert "torch kernels, not batch invariant)" in line
    assert ask(engine)[0] is False
