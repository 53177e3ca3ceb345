"""Routes for administrators: who has them, and what a pause is to clients."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fastapi.testclient import TestClient

from common.phases import find_phase
from common.server.app import create_app
from common.server.options import read_options
from tests.server.support import assert_error, eventually

BODY = {
    "model": "m",
    "prompt": "A pause",
    "max_tokens": 30,
    "temperature": 0,
    "ignore_eos": True,
    "stream": False,
}


def client_of(**options: Any) -> TestClient:
    package = find_phase("phase9_pipelined")
    engine = package.build_engine(package.Config(device="cpu", dtype="float32", max_seq_len=64))
    return TestClient(create_app(engine, model_name="m", **options))


def test_requests_of_a_pause_queue_and_are_answered_when_it_ends() -> None:
    with client_of(admin=True) as client:
        expected = client.post("/v1/completions", json=BODY).json()["choices"]
        assert client.post("/pause").json() == {"status": "paused"}
        assert client.get("/health").json()["status"] == "paused"
        assert client.get("/ready").status_code == 200
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=BODY)))
        asking.start()
        passes = counters(client)["passes"]
        eventually(lambda: counters(client)["requests_added"] == 2)
        asking.join(0.05)
        assert (answers, counters(client)["passes"]) == ([], passes)
        assert client.post("/resume").json() == {"status": "ok"}
        asking.join(30.0)
        assert answers[0].json()["choices"] == expected
        assert client.get("/health").json()["status"] == "ok"
        assert client.get("/pause").status_code == 405


def counters(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/telemetry").json()["counters"]
    return found


def test_without_the_option_nobody_can_pause() -> None:
    with client_of() as client:
        for path in ("/pause", "/resume"):
            assert_error(client.post(path), 404, None, "not_found")
        assert client.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize(("arguments", "admin"), [([], False), (["--admin"], True)])
def test_the_option(arguments: list[str], admin: bool) -> None:
    server, _ = read_options(find_phase("phase9_pipelined"), arguments)
    assert server.admin is admin
