"""Every refusal: its status, its form, and the field it names. (The fixture checks the next request.)"""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import pytest

from tests.server.support import HANG_S, HEAD, PREFIXES, ServerProcess, assert_error


def each(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    """Return a case for each value of each field."""
    return [(field, value) for field, values in table.items() for value in values]


def post_raw(server: ServerProcess, body: bytes, content_type: str | None = "application/json") -> Any:
    headers = {} if content_type is None else {"Content-Type": content_type}
    return server.client.post("/v1/completions", content=body, headers=headers)


# ---------------------------------------------------------------------- 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b"[1, 2]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"model": "m", "prompt": "\xc3("}',
        b"[" * 8_000,
        b'{"model": "zoo:llama-tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "zoo:llama-tiny", "prompt": "a", "seed": ' + b"1" * 10_000 + b"}",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_what_is_not_a_json_object(server: ServerProcess, body: bytes) -> None:
    response = post_raw(server, body)
    assert_error(response, 400, param="temperature" if b"NaN" in body else None)


@pytest.mark.parametrize(
    ("prompt", "status"),
    [(r"\ud800", 400), (r"\udc00", 400), (r"a\ud800b", 400), (r"\udbff\ud800", 400), (r"\ud83d\ude00", 200)],
)
def test_surrogates_come_in_pairs(server: ServerProcess, prompt: str, status: int) -> None:
    for fields in (f'"prompt": "{prompt}"', f'"prompt": ["{prompt}"]', f'"prompt": "a", "stop": "{prompt}"'):
        body = f'{{"model": "{server.model}", "max_tokens": 1, "stream": false, {fields}}}'.encode()
        assert post_raw(server, body).status_code == status


def test_the_prompt_is_required(server: ServerProcess) -> None:
    body = server.body()
    del body["prompt"]
    assert_error(server.client.post("/v1/completions", json=body), 400, "prompt", "missing_field")
    assert_error(server.client.post("/v1/completions", json=body | {"prompt": None}), 400, "prompt")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_model_may_be_missing(server: ServerProcess, prefix: str) -> None:
    body = server.body(prompt="Without a name,", stream=False)
    expected = server.client.post(f"{prefix}/completions", json=body).json()
    del body["model"]
    for unnamed in (body, body | {"model": None}):
        answer = server.client.post(f"{prefix}/completions", json=unnamed).json()
        assert (answer["model"], answer["choices"]) == (server.model, expected["choices"])
    chat = server.ask(f"{prefix}/chat/completions", model=None)
    assert chat.json()["model"] == server.model


EMPTY: list[Any] = ["", [], [[]], [""], ["text", ""], [[1], []]]
NOT_TOKENS: list[Any] = [
    [-1],
    [10**6],
    [1, 2**70],
    [1.5],
    [1.0],
    [True],
    [None],
    [{}],
    [[[1]]],
    [[-1]],
    [[10**6]],
]
MIXED: list[Any] = [[1, "a"], ["a", 1], [[1], ["a"]], [[1], 2]]


@pytest.mark.parametrize("prompt", [*EMPTY, *NOT_TOKENS, *MIXED, {}, 5, False], ids=repr)
def test_what_is_no_prompt(server: ServerProcess, prompt: object) -> None:
    assert_error(server.post(prompt=prompt), 400, "prompt")


WRONG_TYPES: dict[str, list[Any]] = {
    "model": [5],
    "max_tokens": ["5", 5.5, True],
    "temperature": ["hot"],
    "top_k": [1.5],
    "stop": [5, [5], {}],
    "seed": [1.5],
    "stream": ["yes", 1],
    "stream_options": [[], {"include_usage": 1}],
    "logprobs": [True],
    "n": ["2"],
    "stop_token_ids": [["a"]],
    "user": [5],
    "logit_bias": [[]],
    "ignore_eos": [0],
    "cache_salt": [5],
}


@pytest.mark.parametrize(("field", "value"), each(WRONG_TYPES))
def test_wrong_types(server: ServerProcess, field: str, value: object) -> None:
    assert_error(server.post(**{field: value}), 400, field, "invalid_type")


@pytest.mark.parametrize(
    ("content_type", "accepted"),
    [
        *((None, False), ("text/plain", False), ("application/x-www-form-urlencoded", False)),
        *(("application/jsonx", False), ("Application/JSON; charset=utf-8", True)),
    ],
)
def test_the_body_must_be_called_json(
    server: ServerProcess, content_type: str | None, accepted: bool
) -> None:
    response = post_raw(server, json.dumps(server.body(stream=False)).encode(), content_type)
    if accepted:
        assert response.status_code == 200
    else:
        assert_error(response, 400, None, "invalid_content_type")


def test_a_compressed_body_is_refused_by_its_encoding(server: ServerProcess) -> None:
    body = json.dumps(server.body(stream=False)).encode()
    for encoding, sent in (("gzip", gzip.compress(body)), ("br", b"?")):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        answer = server.client.post("/v1/completions", content=sent, headers=headers)
        assert_error(answer, 415, None, "unsupported_encoding", says=encoding)
    plain = {"Content-Type": "application/json", "Content-Encoding": "identity"}
    assert server.client.post("/v1/completions", content=body, headers=plain).status_code == 200


# ---------------------------------------------------------------------- 422


OUT_OF_RANGE: dict[str, list[Any]] = {
    "max_tokens": [0, -2],
    "temperature": [-0.1],
    "top_p": [-0.1, 1.01],
    "top_k": [-2, 2**40],
    "min_p": [-0.1, 1.1],
    "truncate_prompt_tokens": [0, -2],
    "truncation_side": ["both"],
    "repetition_penalty": [0],
    "presence_penalty": [2.1],
    "frequency_penalty": [-2.1],
    "stop": [["x"] * 17, "x" * 257],
    "seed": [2**64],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "n": [0, 17],
    "min_tokens": [-1, 9],  # max_tokens is 8
    "stop_token_ids": [[-1], [10**6], [1] * 257],
    "user": ["x" * 257],
    "cache_salt": ["", "x" * 257],
    "logit_bias": [
        *({"5": 101}, {"5": True}, {"5": "much"}, {"fox": 1}, {"-5": 1}, {"1000000": 1}),
        {str(i): 1 for i in range(1025)},
    ],
    # Fields that are not implemented, at other than their neutral values:
    "suffix": ["x"],
    "best_of": [2],
}


@pytest.mark.parametrize(("field", "value"), each(OUT_OF_RANGE), ids=lambda value: str(value)[:20])
def test_values_out_of_range(server: ServerProcess, field: str, value: object) -> None:
    assert_error(server.post(**{field: value}), 422, field, "invalid_value")


@pytest.mark.parametrize(
    "model", ["", "gpt-4", "zoo:llama-tiny ", "x" * 100_000], ids=lambda model: model[:20]
)
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_another_model(server: ServerProcess, model: str, prefix: str, path: str) -> None:
    response = server.ask(f"{prefix}/{path}", model=model)
    assert_error(response, 404, "model", "model_not_found", says=server.model)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (
            {"max_tokens": 1024},
            "max_tokens",
            "max_tokens 1024 leaves no room for a prompt; this server holds 1024 ",
        ),
        (
            {"prompt": [5] * 1000, "max_tokens": 25},
            "max_tokens",
            "a prompt of 1000 tokens and max_tokens 25 make 1025",
        ),
        ({"prompt": [5] * 1024, "max_tokens": 1}, "prompt", "the prompt has 1024 tokens; "),
        # A long text is refused before it is tokenized, so the message has a bound on its tokens, not their number.
        ({"prompt": "word " * 200, "max_tokens": 1020}, "max_tokens", "a prompt of at least "),
        ({"prompt": "word " * 1024, "max_tokens": 1}, "prompt", "the prompt has "),
        ({"prompt": "word " * 10_000}, "prompt", "the prompt has at least "),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_more_tokens_than_the_server_holds(
    server: ServerProcess, fields: dict[str, Any], param: str, says: str
) -> None:
    assert_error(server.post(**fields), 422, param, says=says)


def test_as_many_tokens_as_the_server_holds(server: ServerProcess) -> None:
    assert server.post(prompt=[5] * 1000, max_tokens=24).status_code == 200


def test_more_choices_than_the_queue_holds(server: ServerProcess) -> None:
    assert_error(server.post(prompt=["a"] * 65), 422, "prompt")
    says = "takes, 64 (its option --max-waiting-requests)"
    assert_error(server.post(prompt=["a"] * 5, n=16), 422, "n", says=says)


def test_one_bad_prompt_refuses_the_whole_list(server: ServerProcess) -> None:
    server.begin_test()
    assert_error(server.post(prompt=[[5], [10**6]]), 400, "prompt")
    assert_error(server.post(prompt=[[5], [5] * 2000]), 422, "prompt")
    assert server.counters()["requests_added"] == 0


# ---------------------------------------------------------------------- 404, 405


@pytest.mark.parametrize(
    ("path", "says"),
    [
        *((path, "") for path in ("/v1", "/v1/completions/", "/v1/chat", "/%00")),
        ("/nowhere", "no such route; see /openapi.json"),
        ("/docs", "/openapi.json, and the page at /"),
        *((f"{prefix}/embeddings", "embeddings are not served") for prefix in PREFIXES),
        ("/api/tags", "Ollama's API is not served, OpenAI's is: GET /v1/models"),
        *(
            (f"/api/{name}", "Ollama's API is not served")
            for name in ("version", "show", "ps", "blobs/sha256:0")
        ),
        ("/api/embed", "embeddings are not served"),
        ("/api/generate", "POST /v1/completions"),
        ("/api/chat", "POST /v1/chat/completions"),
        ("/v1/completion", "did you mean /v1/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/heath", "did you mean /health?"),
        ("/v1/" + "x" * 10_000, "see /openapi.json"),
    ],
    ids=lambda value: value[:40],
)
def test_unknown_routes_say_where_to_look(server: ServerProcess, path: str, says: str) -> None:
    for method in ("GET", "POST"):
        assert_error(server.client.request(method, path), 404, None, "not_found", says)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_wrong_methods_on_completions(server: ServerProcess, method: str) -> None:
    response = server.client.request(method, "/v1/completions")
    if method != "HEAD":  # has no body
        assert_error(response, 405, None, "method_not_allowed")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_a_wrong_method_is_told_of_head_where_it_is_served(server: ServerProcess) -> None:
    response = server.client.post("/v1/models")
    assert_error(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path", ["/", "/v1/models", "/health", "/health/", "/ready", "/version", "/metrics", "/telemetry"]
)
def test_wrong_methods_on_the_small_routes(server: ServerProcess, path: str) -> None:
    for method in ("POST", "OPTIONS", "DELETE"):
        assert_error(server.client.request(method, path), 405, None, "method_not_allowed")
    head, get = server.client.head(path), server.client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_telemetry_checks_its_query(server: ServerProcess) -> None:
    assert_error(server.client.get("/telemetry?since_step=soon"), 400, "since_step", "invalid_type")
    assert_error(server.client.get("/telemetry?since_step=-1"), 422, "since_step", "invalid_value")


# ---------------------------------------------------------------------- 413, and two megabytes of nonsense

LIMIT = 2 * 1024 * 1024


def test_a_body_over_the_limit(server: ServerProcess) -> None:
    assert_error(post_raw(server, b" " * (LIMIT + 1)), 413, None, "body_too_large")
    assert_error(post_raw(server, b" " * LIMIT), 400, None, "invalid_json")  # just read, and then not JSON


def test_an_undeclared_body_is_cut_off_while_it_comes(server: ServerProcess) -> None:
    with server.connect(HEAD + b"Transfer-Encoding: chunked\r\n\r\n") as connection:
        for _ in range(LIMIT // 65536 + 1):
            connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def bad_bodies(model: str) -> dict[str, tuple[bytes, int]]:
    """Return bodies of up to two megabytes with many wrong items, each with the status of its refusal."""
    start = f'{{"model": "{model}", "prompt": '.encode()
    other = start + b'"a", '
    return {
        "bad tokens": (start + b"[1" + b',"x"' * 250_000 + b"]}", 400),
        "bad texts": (start + b'["x"' + b",5" * 250_000 + b"]}", 400),
        "bad token lists": (start + b"[[1]" + b",[[]]" * 4_000 + b"]}", 400),
        "tokens out of the vocabulary": (start + b"[1" + b",1234567" * 250_000 + b"]}", 422),
        "an endless prompt": (start + b'"' + b"word " * 400_000 + b'"}', 422),
        "unknown fields": (other + b",".join(b'"k%d":0' % i for i in range(150_000)) + b', "n": 0}', 422),
        "bad stop strings": (other + b'"stop": [5' + b",5" * 250_000 + b"]}", 400),
        "bad stop tokens": (other + b'"stop_token_ids": ["a"' + b',"a"' * 250_000 + b"]}", 400),
        "logit bias": (
            other + b'"logit_bias": {' + b",".join(b'"%d":"x"' % i for i in range(140_000)) + b"}}",
            422,
        ),
        "a long name": (other + b'"' + b"x" * 1_900_000 + b'": 0, "suffix": 1}', 422),
    }


def test_two_megabytes_of_nonsense_cost_one_error_each(server: ServerProcess) -> None:
    bodies = bad_bodies(server.model)
    for body, status in bodies.values():  # warm up: the allocator keeps memory that it has taken once
        assert post_raw(server, body).status_code == status
    before, started = server.memory_mb(), time.monotonic()
    for _ in range(3):
        for name, (body, status) in bodies.items():
            assert len(body) < LIMIT, name
            response = post_raw(server, body)
            assert response.status_code == status, (name, response.text)
            assert len(response.content) < 4096, name
    assert time.monotonic() - started < HANG_S, "30 bodies; an error for each item would take far longer"
    assert server.memory_mb() - before < 100, "memory is not flat"
