"""Operators' tools: the step timeout, a pause, a proxy's prefix, pages of other origins, and a log in JSON."""

from __future__ import annotations

import datetime
import io
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin

import pytest
from fastapi.testclient import TestClient

from common.server.logs import FIELDS, JsonLines, TextLines
from common.server.options import read_options
from common.startup.phases import find_phase
from tests.support.servers import (
    HANG_S,
    ServerProcess,
    app_with,
    assert_error,
    eventually,
    in_background,
)

PHASE = "phase5_continuous"


# ---------------------------------------------------------------------- a step that never ends


def test_a_step_that_does_not_end_makes_the_server_unwell_until_it_does() -> None:
    with ServerProcess(PHASE, "--step-timeout", "0.5", module="tests.support.gated_server") as server:
        server.order("hold")
        answer = in_background(1, lambda _: server.complete(max_tokens=2))[0]
        server.expect("held")
        for path in ("/health", "/ready"):
            eventually(lambda path=path: server.client.get(path).status_code == 503)
            assert_error(server.client.get(path), 503, None, "engine_stuck")
        assert "infer:http_answers_total" in server.client.get("/metrics").text
        server.order("open")
        assert answer.result(HANG_S)["usage"]["completion_tokens"] == 2
        eventually(lambda: server.client.get("/health").status_code == 200)
        time.sleep(0.7)  # longer than the timeout, but an idle engine is in no step
        assert server.client.get("/health").status_code == 200
        assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


# ---------------------------------------------------------------------- a pause

PAUSED_BODY = {"prompt": "A pause", "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream": False}


def test_requests_of_a_pause_queue_and_are_answered_when_it_ends() -> None:
    with app_with("phase9_pipelined", admin=True) as client:
        expected = client.post("/v1/completions", json=PAUSED_BODY).json()["choices"]
        assert client.post("/pause").json() == {"status": "paused"}
        assert client.get("/health").json()["status"] == "paused"
        assert client.get("/ready").status_code == 200
        answers: list[Any] = []
        asking = threading.Thread(
            target=lambda: answers.append(client.post("/v1/completions", json=PAUSED_BODY))
        )
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
    with app_with() as client:
        for path in ("/pause", "/resume"):
            assert_error(client.post(path), 404, None, "not_found")
        assert client.post("/v1/completions", json=PAUSED_BODY).status_code == 200


# ---------------------------------------------------------------------- below a prefix


@pytest.fixture(scope="module")
def below() -> Iterator[TestClient]:
    with app_with(root_path="/llm/five", api_key=["key"]) as client:
        yield client


@pytest.mark.parametrize("prefix", ["/llm/five", ""], ids=["left", "taken away"])
def test_a_proxy_may_take_its_prefix_away_or_leave_it(below: TestClient, prefix: str) -> None:
    key = {"Authorization": "Bearer key"}
    body = {"model": "m", "prompt": "Once", "max_tokens": 2, "stream": False}
    assert below.get(f"{prefix}/health").status_code == 200  # needs no key
    assert below.get(f"{prefix}/v1/models").status_code == 401
    assert below.get(f"{prefix}/v1/models/m", headers=key).json()["id"] == "m"
    assert below.post(f"{prefix}/v1/completions", json=body, headers=key).status_code == 200
    assert below.get(f"{prefix or '/llm/five'}/", headers=key).headers["content-type"].startswith("text/html")
    # Statuses under the strict address are OpenAI's.
    wrong = below.post(f"{prefix}/openai/v1/completions", json=body | {"temperature": -1}, headers=key)
    assert_error(wrong, 400, "temperature")
    nowhere = below.post(f"{prefix}/v1/completion", headers=key)
    assert "did you mean /v1/completions" in nowhere.json()["error"]["message"]


@pytest.mark.parametrize("address", ["/llm/five", "/llm/five/", "/"])
def test_the_page_calls_addresses_below_the_prefix(below: TestClient, address: str) -> None:
    """A browser would resolve `steps` at /llm/five to /llm/steps, which may be another server's."""
    page = below.get(address)
    base = re.search('<base href="([^"]*)">', page.text)
    assert base is not None
    assert urljoin(str(page.url.join(base[1])), "steps") == "http://testserver/llm/five/steps"
    assert "base-uri 'self'" in page.headers["content-security-policy"], "a browser obeys the element"


def test_other_prefixes_are_not_found(below: TestClient) -> None:
    key = {"Authorization": "Bearer key"}
    assert_error(below.get("/llm/fivehealth", headers=key), 404, None, "not_found")
    assert_error(below.get("/llm/health", headers=key), 404, None, "not_found")
    assert below.get("/openapi.json", headers=key).json()["servers"] == [{"url": "/llm/five"}]


# ---------------------------------------------------------------------- pages of other origins


@pytest.fixture(scope="module")
def shared() -> Iterator[TestClient]:
    with app_with(cors_origin=["https://good.example"], api_key=["key"]) as client:
        yield client


def test_a_page_of_a_named_origin(shared: TestClient) -> None:
    """The browser's preflight request has no key. The page may then read answers and refusals."""
    origin = {"Origin": "https://good.example"}
    asking = origin | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",  # from Chrome
    }
    first = shared.options("/v1/completions", headers=asking)
    assert first.status_code == 200
    assert first.headers["access-control-allow-origin"] == "https://good.example"
    assert "POST" in first.headers["access-control-allow-methods"]
    assert "authorization" in first.headers["access-control-allow-headers"]
    assert first.headers["access-control-allow-private-network"] == "true"
    for headers, status in ((origin | {"Authorization": "Bearer key"}, 200), (origin, 401)):
        answer = shared.get("/v1/models", headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_a_page_of_an_unlisted_origin_is_refused(shared: TestClient, below: TestClient) -> None:
    headers = {"Origin": "https://bad.example", "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Private-Network"] = "true"
    for client in (shared, below):
        assert client.options("/v1/completions", headers=headers).status_code >= 400
        answer = client.get("/health", headers=headers)
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (200, False)


def test_every_origin_may_be_allowed() -> None:
    options, _ = read_options(find_phase(PHASE), ["--cors-origin", "*"])
    with app_with(cors_origin=options.cors_origin) as client:
        answer = client.get("/health", headers={"Origin": "https://bad.example"})
        assert answer.headers["access-control-allow-origin"] == "*"


# ---------------------------------------------------------------------- errors that nobody expected


def test_an_unexpected_error_has_the_requests_id_and_can_be_read_by_a_page(logged: io.StringIO) -> None:
    async def fail() -> None:
        raise ZeroDivisionError("a secret")

    origin = "https://page.example"
    with app_with(cors_origin=[origin]) as client:
        client.app.add_api_route("/fail", fail, methods=["GET"])  # type: ignore[attr-defined]
        answer = client.get("/fail", headers={"X-Request-ID": "job-5", "Origin": origin})
        assert_error(answer, 500, None, "internal_error")
        assert answer.headers["x-request-id"] == "job-5"
        assert answer.headers["access-control-allow-origin"] == origin
        assert "secret" not in answer.text
        assert client.get("/health").status_code == 200
    tracebacks = [line["traceback"] for line in json_lines(logged.getvalue()) if line["level"] == "ERROR"]
    assert len(tracebacks) == 1
    assert all("ZeroDivisionError: a secret" in each for each in tracebacks)


# ---------------------------------------------------------------------- the log


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects of all lines, which must have a time, a level, a message and a logger."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        datetime.datetime.fromisoformat(line["time"])
        assert line["level"] in ("DEBUG", "INFO", "WARNING", "ERROR")
        assert line["message"]
        assert line["logger"]
    return lines


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """The JSON log of the modules of `common`."""
    handler, ours = logging.StreamHandler(io.StringIO()), logging.getLogger("common")
    handler.setFormatter(JsonLines())
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    yield handler.stream
    ours.removeHandler(handler)
    ours.setLevel(level)


def test_a_request_has_its_numbers_as_fields(logged: io.StringIO) -> None:
    with app_with() as client:
        logged.truncate(0)
        logged.seek(0)
        body = {"model": "m", "prompt": ["Once", "A"], "max_tokens": 5, "ignore_eos": True, "stream": False}
        answer = client.post("/v1/completions", json=body | {"user": "a\nb"}, headers={"x-request-id": "r1"})
        assert client.post("/v1/completions", json=body | {"temperature": -1}).status_code == 422
        end, refusal = json_lines(logged.getvalue())
        usage = answer.json()["usage"]
        assert end["message"].startswith(
            f"{answer.json()['id']}: 2 choices, {usage['prompt_tokens']} prompt and 10 new"
        )
        assert {name: end[name] for name in ("id", "choices", "prompt_tokens", "new_tokens", "ended")} == {
            "id": answer.json()["id"],
            "choices": 2,
            "prompt_tokens": usage["prompt_tokens"],
            "new_tokens": 10,
            "ended": {"length": 2},
        }
        assert (end["user"], end["request_id"], end["client_gone"]) == ("a\nb", "r1", None)
        assert 0 < end["first_token_s"] < 60
        assert 0 <= end["longest_gap_s"] < 60
        assert (refusal["status"], refusal["code"], refusal["param"]) == (422, "invalid_value", "temperature")


def test_nothing_in_the_log_can_end_a_line_or_reach_the_terminal() -> None:
    try:
        raise ZeroDivisionError("red \x1b[31m\u202e")
    except ZeroDivisionError:
        record = logging.LogRecord(
            "a", logging.ERROR, "", 1, "größer\r\n%s", ("\x9b2J\udcff",), sys.exc_info()
        )
    first, *others, last = TextLines("%(levelname)s %(message)s").format(record).split("\n")
    assert first == r"ERROR größer\r\n\x9b2J\udcff"
    assert others[0] == "Traceback (most recent call last):"
    assert last == r"ZeroDivisionError: red \x1b[31m\u202e"


def test_forwarded_addresses_are_logged_for_trusted_proxies_only(server: ServerProcess) -> None:
    trust = ("--forwarded-allow-ips", "10.0.0.1,127.0.0.1")
    with ServerProcess(PHASE, "--max-seq-len", "64", *trust) as trusting:
        for each, origin in ((server, "from 127.0.0.1,"), (trusting, r"from '\x1b[2J 1',")):
            each.begin_test()
            body = each.body(max_tokens=1, stream=False)
            forwarded = {"X-Forwarded-For": "\x1b[2J 1"}
            assert each.client.post("/v1/completions", json=body, headers=forwarded).status_code == 200
            eventually(lambda each=each, origin=origin: origin in each.log_text)
            assert "\x1b" not in each.log_text
        trusting.assert_serves()


def test_an_exception_is_one_json_line() -> None:
    try:
        raise ZeroDivisionError("two\nlines")
    except ZeroDivisionError:
        record = logging.LogRecord("a", logging.ERROR, "", 1, "went %s", ("wrong",), sys.exc_info())
    setattr(record, FIELDS, {"status": 500, "odd": {1}, "path": "\udcff"})
    (line,) = json_lines(JsonLines().format(record))
    assert (line["message"], line["status"], line["odd"]) == ("went wrong", 500, "{1}")
    assert line["path"] == "\udcff", "what is no text"
    assert line["traceback"].endswith("ZeroDivisionError: two\nlines")
