"""API keys, the model's names, and the ids of requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.servers import HANG_S, ServerProcess, assert_error, eventually, in_background

KEYS = ("first-key", "schlüssel zwei")


@pytest.fixture(scope="module")
def named() -> Iterator[ServerProcess]:
    """A server with two keys, from the environment, and three names, from flags."""
    with ServerProcess(
        "phase5_continuous",
        *("--served-model-name", "mine", "--served-model-name", "yours,owner/theirs", "--max-seq-len", "256"),
        env={"INFER_API_KEY": ",".join(KEYS)},
        headers={"Authorization": f"Bearer {KEYS[0]}"},
    ) as process:
        yield process


def ask(server: ServerProcess, path: str, **headers: str) -> httpx.Response:
    with httpx.Client(base_url=server.url, timeout=HANG_S) as client:
        return client.get(path, headers={name: value.encode() for name, value in headers.items()})


# ---------------------------------------------------------------------- keys


@pytest.mark.parametrize("path", ["/steps", "/v1/models", "/telemetry", "/trace", "/openapi.json", "/no"])
def test_a_request_without_a_key_is_refused(named: ServerProcess, path: str) -> None:
    named.begin_test()
    wrong = ("", "Bearer", "Bearer wrong", f"Basic {KEYS[0]}", KEYS[0], f"Bearer {KEYS[0]}x")
    for headers in ({}, *({"Authorization": value} for value in wrong)):
        response = ask(named, path, **headers)
        assert_error(response, 401, None, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
        assert not any(key in response.text + named.log_text for key in KEYS)
    eventually(lambda: "refused: 401" in named.log_text)


def test_a_request_without_a_key_is_refused_before_its_body_comes(named: ServerProcess) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    with named.connect(head) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_every_key_is_accepted(named: ServerProcess) -> None:
    for key in KEYS:
        for scheme in ("Bearer", "bearer"):
            assert ask(named, "/v1/models", Authorization=f"{scheme} {key}").status_code == 200
        headers = {"Authorization": "", "X-Api-Key": key}  # as Anthropic's libraries send it
        assert ask(named, "/v1/models", **headers).status_code == 200
        assert_error(ask(named, "/v1/models", **headers | {"X-Api-Key": f"{key}x"}), 401)


@pytest.mark.parametrize(
    "path", ["/", "/health", "/health/", "/ready", "/metrics", "/openai/metrics", "/version"]
)
def test_monitoring_routes_need_no_key(named: ServerProcess, path: str) -> None:
    assert ask(named, path).status_code == 200


# ---------------------------------------------------------------------- the model's names


def test_a_model_answers_to_each_served_name(named: ServerProcess) -> None:
    cards = named.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["mine", "yours", "owner/theirs"]
    for name in ("", "mine", "yours", "owner/theirs"):
        assert named.complete(model=name, max_tokens=1)["model"] == "mine"
    for name in ("mine", "yours", "owner/theirs"):
        assert named.client.get(f"/v1/models/{name}").json()["id"] == name
    assert_error(named.post(model="zoo:llama-tiny"), 404, "model", "model_not_found")
    assert_error(named.client.get("/v1/models/"), 404, "model", "model_not_found")


# ---------------------------------------------------------------------- ids of requests


def test_a_request_id_is_returned_and_logged(server: ServerProcess) -> None:
    headers = {"X-Request-ID": "job/17:a"}
    for stream in (True, False):
        server.begin_test()
        body = server.body(stream=stream, max_tokens=1)
        response = server.client.post("/v1/completions", json=body, headers=headers)
        assert response.headers["x-request-id"] == "job/17:a"
        eventually(lambda: "request 'job/17:a', ended: " in server.log_text)
    for path, status in (("/health", 200), ("/nowhere", 404), ("/v1/completions", 405)):
        response = server.client.get(path, headers=headers)
        assert (response.status_code, response.headers["x-request-id"]) == (status, "job/17:a")


def test_a_generated_request_id_is_the_answers_id(server: ServerProcess) -> None:
    response = server.client.post("/v1/completions", json=server.body(stream=False, max_tokens=1))
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_requests_with_the_same_id_do_not_interfere(server: ServerProcess) -> None:
    """A client may use one id twice, even at the same time."""

    def ask(_: int) -> Any:
        body = server.body(stream=False, max_tokens=30)
        return server.client.post("/v1/completions", json=body, headers={"X-Request-ID": "same"})

    answers = [each.result(HANG_S).json() for each in in_background(4, ask)]
    assert len({answer["id"] for answer in answers}) == 4
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1


@pytest.mark.parametrize("request_id", [b"", b"a b", b"x" * 129, b"\xff"])
def test_invalid_request_ids_are_refused(server: ServerProcess, request_id: bytes) -> None:
    response = server.client.get("/health", headers={"X-Request-ID": request_id})
    assert_error(response, 400, None, "invalid_request_id")
    assert server.complete(max_tokens=1)["choices"]
