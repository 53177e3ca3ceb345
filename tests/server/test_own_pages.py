"""A server without keys, protected from pages of other sites: allowed host names, and refused browser requests."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from common.server.http.middleware import AllowedHosts
from tests.support.servers import ServerProcess, app_with, assert_error, eventually

ORIGIN = "https://friend.example"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """A client of an app that pages of one other site may use."""
    hosts = AllowedHosts("127.0.0.1", ["chat.example.org"])
    with app_with(hosts=hosts, cors_origin=[ORIGIN]) as client:
        yield client


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:8000", "localhost:8000", "LOCALHOST.", "infer.localhost", "[::1]:8000"),
        *("192.168.1.7:8000", "[fe80::1]", "chat.example.org", "Chat.Example.org:443", socket.gethostname()),
        *("host.docker.internal:8000", "my-mac.local"),
    ],
)
def test_local_host_names_are_allowed(client: TestClient, host: str) -> None:
    assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "internal.evil.example",
        "short",
        "[evil]",
    ],
)
def test_other_host_names_are_refused(client: TestClient, host: str) -> None:
    for path in ("/v1/models", "/telemetry", "/steps", "/trace", "/openapi.json", "/no"):
        response = client.get(path, headers={"Host": host})
        assert_error(response, 403, None, "host_not_allowed")
        assert "--allowed-host" in response.json()["error"]["message"]
        assert response.headers["x-request-id"]
    assert client.get("/health", headers={"Host": host}).status_code == 200
    assert client.get("/v1/models", headers={"Host": "localhost"}).status_code == 200


@pytest.mark.parametrize(
    ("bound", "others", "host", "allowed"),
    [
        ("127.0.0.1", [], "infer", False),
        ("localhost", [], "infer", False),
        ("::1", [], "infer", False),
        ("0.0.0.0", [], "infer:8000", True),
        ("::", [], "any.example", True),
        ("0.0.0.0", ["a.example"], "any.example", False),
        ("0.0.0.0", ["a.example"], "a.example", True),
        ("gpu.example", ["a.example"], "gpu.example:8000", True),
        ("127.0.0.1", ["*"], "evil.example", True),
        ("127.0.0.1", ["a.example:8000"], "a.example", True),
        ("127.0.0.1", [], "", True),
    ],
)
def test_allowed_host_names_depend_on_the_bound_address(
    bound: str, others: list[str], host: str, allowed: bool
) -> None:
    assert AllowedHosts(bound, others).allow(host) == allowed


def test_keys_replace_the_check_of_host_names() -> None:
    """A server without keys refuses unknown host names. A server with keys requires a key instead."""
    with ServerProcess(
        "phase5_continuous", "--max-seq-len", "64", "--allowed-host", "mine.example,its.example"
    ) as server:
        headers = {"Host": "evil.example"}
        assert_error(server.client.get("/v1/models", headers=headers), 403, None, "host_not_allowed")
        assert server.client.get("/v1/models", headers={"Host": "its.example"}).status_code == 200
        eventually(lambda: "refused: 403 host_not_allowed" in server.log_text)
    with app_with(api_key=["key"], hosts=AllowedHosts("127.0.0.1")) as keyed:
        assert_error(keyed.get("/v1/models", headers=headers), 401, None, "invalid_api_key")
        assert keyed.get("/v1/models", headers=headers | {"Authorization": "Bearer key"}).status_code == 200


# ---------------------------------------------------------------------- requests of other sites' pages

LOCAL = {"Host": "127.0.0.1:8000"}
BODY = {"model": "m", "prompt": "Once", "max_tokens": 1, "stream": False}


@pytest.mark.parametrize("origin", [{}, {"Origin": "https://evil.example"}, {"Origin": "null"}])
def test_a_page_of_another_site_causes_no_work(client: TestClient, origin: dict[str, str]) -> None:
    page = LOCAL | origin | {"Sec-Fetch-Site": "cross-site"}
    for mode in ("cors", "no-cors", "navigate"):
        headers = page | {"Sec-Fetch-Mode": mode}
        for path in ("/v1/completions", "/tokenize", "/reset_prefix_cache"):
            assert_error(client.post(path, json=BODY, headers=headers), 403, None, "cross_site")
    for path in ("/trace", "/steps"):  # as the address of a picture
        answer = client.get(path, headers=page | {"Sec-Fetch-Mode": "no-cors"})
        assert_error(answer, 403, None, "cross_site")
    assert client.post("/v1/completions", json=BODY, headers=LOCAL).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8000", 200),
        ("http://127.0.0.1:3000", 403),
        ("https://evil.example", 403),
        ("null", 403),
        (ORIGIN, 200),
    ],
)
def test_the_origin_decides_without_fetch_metadata(client: TestClient, origin: str, status: int) -> None:
    """Such a browser does not send `Sec-Fetch-Site`, as no browser does over HTTP to another machine."""
    headers = LOCAL | {"Origin": origin}
    answer = client.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert_error(answer, 403, None, "cross_site")
    assert client.post("/v1/completions", json=BODY, headers=LOCAL).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        *({}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "none"}),
        {"Sec-Fetch-Site": "cross-site", "Origin": ORIGIN},
    ],
)
def test_own_pages_are_allowed(client: TestClient, headers: dict[str, str]) -> None:
    assert client.post("/v1/completions", json=BODY, headers=LOCAL | headers).status_code == 200


def test_a_link_may_be_followed(client: TestClient) -> None:
    headers = LOCAL | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.get("/", headers=headers).status_code == 200


def test_the_prefix_cache_is_reset_by_json_alone(client: TestClient) -> None:
    """A form in a page can post text, but not JSON."""
    path = "/reset_prefix_cache"
    for media_type in (
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
    ):
        answer = client.post(path, content="{}", headers=LOCAL | media_type)
        assert_error(answer, 400, None, "invalid_content_type")
    for fields in ({"a": 1}, [], 0):
        assert_error(client.post(path, json=fields, headers=LOCAL), 400, None, "unknown_field")
    nothing = client.post(path, headers=LOCAL | {"Content-Type": "application/json"})
    assert nothing.json() == client.post(path, json={}, headers=LOCAL).json() == {"dropped_blocks": 0}
