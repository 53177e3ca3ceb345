"""Refusals: the status, the form, and the field that is named. After each of them the next request is served."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import httpx
import pytest

from tests.support.servers import HANG_S, HEAD, MESSAGES, PREFIXES, ServerProcess, assert_error

COMPLETIONS, CHAT, RESPONSES = "/completions", "/chat/completions", "/responses"


def each(table: dict[str, list[Any]]) -> list[tuple[dict[str, Any], str]]:
    """Return the fields and the name of the field for each value of a table."""
    return [({field: value}, field) for field, values in table.items() for value in values]


# ---------------------------------------------------------------------- values of a wrong type

#: Values of `prompt` that are refused, by the code of the refusal.
NO_PROMPTS: dict[str, list[Any]] = {
    "invalid_type": [
        {},
        5,
        False,
        [1.5],
        [True],
        [None],
        [[[1]]],
        [1, "a"],
        ["a", 1],
        [[1], ["a"]],
        [[1], 2],
    ],
    "invalid_value": ["", [], [[]], [""], ["text", ""], [[1], []], [-1], [[-1]]],
    "invalid_prompt": [[10**6], [1, 2**70], [[5], [10**6]]],
}
#: The validation of types is pydantic's, so a few fields stand for all.
WRONG_TYPES: dict[str, list[Any]] = {
    "model": [5],
    "max_tokens": ["5", 5.5, True],
    "temperature": ["hot"],
    "stop": [5, [5], {}],
    "stream_options": [[], {"include_usage": 1}],
    "logprobs": [True],
    "allowed_token_ids": [["5"]],
    "skip_special_tokens": ["no"],
    "metadata": [5],
    "logit_bias": [[]],
    "ignore_eos": [0],
    "response_format": ["json", {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}],
    "structured_outputs": [{"json": 5}, {"regex": ["a"]}, {"choice": ["a", 5]}],
}
MALFORMED: dict[str, list[tuple[dict[str, Any], str]]] = {
    COMPLETIONS: each(WRONG_TYPES),
    CHAT: each(
        {
            "messages": ["Hello", [5], [{"role": "user", "content": 5}]],
            "logprobs": [2],
            "chat_template_kwargs": [[]],
            "tools": ["all", [1]],
            "prediction": ["text"],
            "tool_choice": [1],
        }
    ),
    RESPONSES: each(
        {
            "input": [None, 5, [5]],
            "instructions": [5],
            "text": [[]],
            "max_output_tokens": ["8"],
        }
    ),
}

#: Requests that lack a field of one of their objects.
INCOMPLETE: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"response_format": {}}, "response_format"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    (CHAT, {"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools"),
    (CHAT, {"prediction": {"type": "content"}}, "prediction"),
    (RESPONSES, {"input": [{"role": "user"}]}, "input"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c1"}]}, "input"),
]

# ---------------------------------------------------------------------- values that are not accepted

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
    "stop": [["x"] * 65, "x" * 257],
    "seed": [2**64],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "n": [0, 17],
    "min_tokens": [-1, 9],  # max_tokens is 8
    "stop_token_ids": [[-1], [10**6], [1] * 257],
    "allowed_token_ids": [[], [5, 1024]],
    "bad_words": [[""], [" "], ["x"] * 257, ["x" * 257]],
    "priority": [2**31],
    "user": ["x" * 257],
    "cache_salt": ["", "x" * 257],
    "logit_bias": [
        *({"5": 101}, {"5": True}, {"5": "much"}, {"fox": 1}, {"-5": 1}, {"1000000": 1}),
        {str(i): 1 for i in range(1025)},
    ],
}

#: Requests for more tokens or choices than the server holds, whatever their prompt.
TOO_MUCH: list[tuple[dict[str, Any], str, str]] = [
    (
        {"max_tokens": 1024},
        "max_tokens",
        "max_tokens 1024 leaves no room for a prompt; this server holds 1024 ",
    ),
    ({"prompt": ["a"] * 65}, "prompt", ""),
    ({"prompt": ["a"] * 5, "n": 16}, "n", "takes, 64 (its option --max-waiting-requests)"),
    ({"max_tokens": 0}, "max_tokens", ""),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", ""),
]

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
#: Some of the reasons for which a grammar is refused; `tests/common/test_grammar.py` has all.
CONSTRAINTS: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({"structured_outputs": {name: value}}, f"structured_outputs.{name}", says)
        for name, value, says in (
            ("json", {"type": "array", "uniqueItems": True}, "uniqueItems"),
            ("json", "{", "line 1"),
            ("regex", "[a", "unclosed"),
            ("grammar", "start: nowhere", "nowhere"),
            ("choice", ["x" * 70_000], "characters"),
            ("json_object", True, "response_format"),
        )
    ),
    *(
        ({"structured_outputs": value}, "structured_outputs", says)
        for value, says in (
            ({}, "one of"),
            ({"xml": "a"}, "one of"),
            ({"regex": "a", "choice": ["a"]}, "not 2"),
            ({"choice": [""]}, "at least 1"),
        )
    ),
    ({"regex": "a", "json_schema": {"type": "null"}}, "structured_outputs", "not 2"),
    ({"guided_choice": "yes"}, "guided_choice", "list"),
    (
        {"response_format": SCHEMA, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "response_format",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": SCHEMA | {"type": "text"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "text"}},
            }
        },
        "response_format.json_schema.schema",
        "Invalid type: text",
    ),
]


def function(name: str, parameters: Any = None) -> dict[str, Any]:
    """Return a tool of chat."""
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


def said(content: Any, role: str = "user", **fields: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} | fields]


FOX = function("find_fox")
NAMED = {"type": "function", "function": {"name": "find_fox"}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/fox.png"}}
CONVERSATIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", ""),
    ({"messages": MESSAGES * 1025}, "messages", ""),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 128}] * 16}, "messages", ""),
    ({"messages": said([{"type": "text", "text": ""}] * 257)}, "messages", ""),
    ({"messages": said("x", reasoning="y")}, "messages[0].reasoning_content", ""),
    ({"messages": said("1", "function", name="f")}, "messages[0].role", "tool_calls"),
    ({"messages": said("1", tool_call_id="1")}, "messages[0].tool_call_id", "tool"),
    ({"messages": said("1", tool_calls=[CALL])}, "messages[0].tool_calls", "assistant"),
    ({"messages": said([IMAGE])}, "messages[0].content[0].type", "implemented: 'text'"),
    ({"messages": said([{"type": "x" * 5000}])}, "messages[0].content[0].type", "xxx…' is refused"),
    ({"max_tokens": None, "min_tokens": 1020}, "min_tokens", ""),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", ""),
    ({"top_logprobs": 2}, "top_logprobs", ""),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", ""),
    ({"chat_template_kwargs": {"chat_template": "rag"}}, "chat_template_kwargs.chat_template", ""),
    ({"chat_template": "{{ 1 }}"}, "chat_template", ""),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", ""),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "'custom'"),
    ({"tools": [FOX, FOX]}, "tools[1]", "find_fox"),
    ({"tools": [function("hide", {"type": "string"})]}, "tools[0]", "object"),
    ({"tools": [function("hide", {"properties": []})], "tool_choice": "required"}, "tools", "properties"),
    ({"tools": [function("hide", {"maximum": 10**400})]}, "tools[0]", "308 digits"),
    ({"tools": [function("a b")]}, "tools", "pattern"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [FOX], "tool_choice": "any"}, "tool_choice", "required"),
    ({"tools": [FOX], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
    ({"tools": [FOX], "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "tools"),
    (
        {"tools": [FOX], "structured_outputs": {"json": {}}, "tool_choice": NAMED},
        "structured_outputs.json",
        "requires a call",
    ),
    (
        {"tools": [FOX], "response_format": {"type": "json_object"}, "tool_choice": "required"},
        "response_format",
        "requires a call",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "tools"),
    ({"prediction": {"type": "content", "content": [IMAGE]}}, "prediction.content[0].type", "'image_url'"),
]

OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OWN = {"type": "function", "name": "find_fox"}
FILES = {"type": "namespace", "name": "files", "description": "", "tools": [OWN | {"name": "read"}]}
ITEMS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": [*said("Hello"), {"type": "computer_call", "id": "cu_1"}]}, "input[1].type", "computer_call"),
    ({"input": said([{"type": "input_image"}])}, "input[0].content[0].type", "input_image"),
    (
        {"input": [CALLED, OUTPUT | {"output": [{"type": "input_file"}]}]},
        "input[1].output[0].type",
        "input_file",
    ),
    ({"input": [OUTPUT, CALLED]}, "input[0].call_id", "no function_call before it"),
    ({"input": [CALLED, OUTPUT | {"call_id": "c2"}]}, "input[1].call_id", "c2"),
    ({"input": []}, "input", "at least 1 item"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no item in it"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "web_search"),
    ({"tools": [FILES, OWN | {"name": "files__read"}]}, "tools[1]", "files__read"),
    ({"tools": [OWN], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'f'"),
    ({"n": 2}, "n", "one answer"),
    ({"conversation": "conv_1"}, "conversation", "send the items themselves"),
    ({"background": True}, "background", "stream"),
    *(
        ({"text": {"format": form}}, param, says)
        for form, param, says in (
            ({"type": "json_schema", "name": "x"}, "text.format", "go together"),
            ({"type": "text", "schema": {}}, "text.format", "go together"),
            ({"type": "json_schema", "name": "x", "schema": {"type": "x"}}, "text.format.schema", ""),
        )
    ),
    *(
        ({"text": {"format": {"type": "json_object"}}} | second, param, "send one")
        for second, param in (
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
        )
    ),
    ({"top_logprobs": 3}, "top_logprobs", "include"),
    ({"include": ["file_search"]}, "include", ""),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", ""),
]

#: By route: prompts that are too long, alone or with `max_tokens`, for a server that holds 1,024 tokens. A long
#: text is refused before it is tokenized, so the message has a bound on its tokens, not their number.
TOO_LONG: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    COMPLETIONS: [
        (
            {"prompt": [5] * 1024},
            "prompt",
            "prompt is too long: 1024 tokens > 1023 maximum. This model's maximum context length is 1024 tokens ",
        ),
        (
            {"prompt": [5] * 1000, "max_tokens": 25},
            "max_tokens",
            "you requested 25 output tokens (max_tokens) and your prompt contains 1000 input tokens, for a total "
            "of 1025 tokens",
        ),
        ({"prompt": "word " * 200, "max_tokens": 1020}, "max_tokens", "prompt contains at least "),
        ({"prompt": "word " * 10_000}, "prompt", "prompt is too long: at least "),
        ({"prompt": [5] * 1500, "truncate_prompt_tokens": 1024}, "prompt", ""),
        ({"prompt": [5] * 1500, "truncate_prompt_tokens": 1020, "max_tokens": 5}, "max_tokens", ""),
    ],
    CHAT: [({"messages": said("w o r d " * 600), "max_tokens": None}, "messages", "")],
    RESPONSES: [({"input": "word " * 5000}, "input", "maximum context length is 1024 tokens")],
}

#: Route, fields, status, code, the field that is named, and a part of the message.
REFUSALS = [
    *(
        (route, fields, 400, "invalid_type", param, "")
        for route, table in MALFORMED.items()
        for fields, param in table
    ),
    *(
        (COMPLETIONS, {"prompt": prompt}, 400, code, "prompt", "")
        for code, prompts in NO_PROMPTS.items()
        for prompt in prompts
    ),
    *((route, fields, 400, "missing_field", param, "") for route, fields, param in INCOMPLETE),
    *((COMPLETIONS, fields, 422, "invalid_value", param, "") for fields, param in each(OUT_OF_RANGE)),
    *(
        (route, fields, 422, "invalid_value", param, says)
        for route, table in ((COMPLETIONS, TOO_MUCH), (COMPLETIONS, CONSTRAINTS), (CHAT, CONVERSATIONS))
        for fields, param, says in table
    ),
    *((RESPONSES, fields, 422, "invalid_value", param, says) for fields, param, says in ITEMS),
    *(
        (route, fields, 422, "context_length_exceeded", param, says)
        for route, table in TOO_LONG.items()
        for fields, param, says in table
    ),
    *(
        (route, {"model": model}, 404, "model_not_found", "model", "zoo:llama-tiny")
        for route in (COMPLETIONS, CHAT, RESPONSES)
        for model in ("zoo:llama-tiny ", "x" * 100_000)
    ),
]


@pytest.mark.parametrize(
    ("route", "fields", "status", "code", "param", "says"), REFUSALS, ids=lambda value: str(value)[:40]
)
def test_a_refusal_names_its_field(
    server: ServerProcess, route: str, fields: dict[str, Any], status: int, code: str, param: str, says: str
) -> None:
    """Under `/openai/v1`, 422 is 400. A refusal comes before the stream, if the answer was to be streamed."""
    for prefix, streams in (("/v1", False), ("/v1", True), ("/openai/v1", False)):
        response = server.ask(prefix + route, **{"stream": streams} | fields)
        expected = 400 if prefix == "/openai/v1" and status == 422 else status
        assert_error(response, expected, param, code, says)


def test_refused_prompts_reach_no_engine(server: ServerProcess) -> None:
    """One bad prompt refuses the whole list."""
    server.begin_test()
    for prompt in ([[5], [10**6]], [[5], [5] * 2000], ""):
        assert server.post(prompt=prompt).status_code in (400, 422)
    assert server.counters()["requests_added"] == 0
    assert server.post(prompt=[5] * 1000, max_tokens=24).status_code == 200, "as many as the server holds"


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 422, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 422, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 422, "messages"),
        ("/tokenize", {"messages": said("", "function")}, 422, "messages[0].role"),
        ("/tokenize", {"prompt": "x", "model": "another"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "tools": [{}]}, 400, "tools"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [5, 10**6]}, 422, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "another"}, 404, "model"),
        ("/apply-template", {"messages": []}, 422, "messages"),
        ("/v1/responses/input_tokens", {}, 400, "input"),
        ("/v1/completions", {"max_tokens": 5}, 400, "prompt"),
        ("/v1/completions", {"prompt": None}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "stream": "yes"}, 400, "stream"),
    ],
    ids=str,
)
def test_refusals_of_other_routes(
    server: ServerProcess, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    assert_error(server.client.post(path, json=fields), status, param)


# ---------------------------------------------------------------------- bodies


def post_raw(
    server: ServerProcess, body: bytes, media_type: str | None = "application/json", **headers: str
) -> httpx.Response:
    headers |= {} if media_type is None else {"Content-Type": media_type}
    return server.client.post("/v1/completions", content=body, headers=headers)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"not json", b"[1, 2]", b"null", b"\xff\xfe", b'{"prompt": "\xc3("}', b"[" * 8_000),
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "seed": ' + b"1" * 10_000 + b"}",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_bodies_that_are_no_json_object(server: ServerProcess, body: bytes) -> None:
    assert_error(post_raw(server, body), 400, param="temperature" if b"NaN" in body else None)


@pytest.mark.parametrize(
    ("prompt", "status"),
    [(r"\ud800", 400), (r"\udc00", 400), (r"a\ud800b", 400), (r"\udbff\ud800", 400), (r"\ud83d\ude00", 200)],
)
def test_surrogates_come_in_pairs(server: ServerProcess, prompt: str, status: int) -> None:
    for fields in (f'"prompt": "{prompt}"', f'"prompt": ["{prompt}"]', f'"prompt": "a", "stop": "{prompt}"'):
        body = f'{{"model": "{server.model}", "max_tokens": 1, "stream": false, {fields}}}'.encode()
        assert post_raw(server, body).status_code == status


def test_a_body_must_be_plain_json_by_its_headers(server: ServerProcess) -> None:
    body = json.dumps(server.body(stream=False)).encode()
    for media_type in (None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"):
        assert_error(post_raw(server, body, media_type), 400, None, "invalid_content_type")
    assert post_raw(server, body, "Application/JSON; charset=utf-8").status_code == 200
    for encoding, sent in (("gzip", gzip.compress(body)), ("br", b"?")):
        refused = post_raw(server, sent, **{"Content-Encoding": encoding})
        assert_error(refused, 415, None, "unsupported_encoding", says=encoding)
    assert post_raw(server, body, **{"Content-Encoding": "identity"}).status_code == 200


LIMIT = 2 * 1024 * 1024


def test_a_body_over_the_limit(server: ServerProcess) -> None:
    assert_error(post_raw(server, b" " * (LIMIT + 1)), 413, None, "body_too_large")
    assert_error(post_raw(server, b" " * LIMIT), 400, None, "invalid_json")  # just read, and then not JSON
    with server.connect(HEAD + b"Transfer-Encoding: chunked\r\n\r\n") as connection:  # no size is declared
        for _ in range(LIMIT // 65536 + 1):
            connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_two_megabytes_of_wrong_items_cost_one_error_each(server: ServerProcess) -> None:
    start = f'{{"model": "{server.model}", "prompt": '.encode()
    other = start + b'"a", '
    biases = b",".join(b'"%d":"x"' % i for i in range(140_000))
    bodies = [
        (start + b"[1" + b',"x"' * 250_000 + b"]}", 400),
        (start + b"[1" + b",1234567" * 250_000 + b"]}", 422),
        (start + b'"' + b"word " * 400_000 + b'"}', 422),
        (other + b",".join(b'"k%d":0' % i for i in range(150_000)) + b', "n": 0}', 422),
        (other + b'"stop": [5' + b",5" * 250_000 + b"]}", 400),
        (other + b'"logit_bias": {' + biases + b"}}", 422),
        (other + b'"' + b"x" * 1_900_000 + b'": 0, "suffix": 1}', 422),
    ]
    for body, status in bodies:  # warm up: the allocator keeps memory that it has taken once
        assert post_raw(server, body).status_code == status
    before, began_s = server.memory_mb(), time.monotonic()
    for body, status in bodies * 2:
        response = post_raw(server, body)
        assert (response.status_code, len(response.content) < 4096) == (status, True), response.text
    assert time.monotonic() - began_s < HANG_S, "an error for each item would take far longer"
    assert server.memory_mb() - before < 100, "memory is not flat"


# ---------------------------------------------------------------------- routes and methods


@pytest.mark.parametrize(
    ("path", "says"),
    [
        *((path, "") for path in ("/v1", "/v1/completions/", "/v1/chat", "/%00")),
        ("/nowhere", "no such route; see /openapi.json"),
        ("/docs", "/openapi.json, and the page at /"),
        *((f"{prefix}/embeddings", "embeddings are not served") for prefix in PREFIXES),
        *((f"{prefix}/batches", "batches are not served") for prefix in PREFIXES),
        *((f"/v1/{name}", "no such route; see /openapi.json") for name in ("moderations", "conversations")),
        ("/api/tags", "Ollama's API is not served, OpenAI's is"),
        ("/api/embeddings", "embeddings are not served"),
        ("/api/chat", "POST /v1/chat/completions"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/heath", "did you mean /health?"),
        ("/v1/" + "x" * 10_000, "see /openapi.json"),
    ],
    ids=lambda value: value[:40],
)
def test_an_unknown_route_says_where_to_look(server: ServerProcess, path: str, says: str) -> None:
    for method in ("GET", "POST"):
        assert_error(server.client.request(method, path), 404, None, "not_found", says)


def test_a_wrong_method_names_the_allowed_ones(server: ServerProcess) -> None:
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"):
        response = server.client.request(method, "/v1/completions")
        assert_error(response, 405, None, "method_not_allowed")
        assert response.headers["allow"] == "POST"
    head = server.client.head("/v1/completions")
    assert (head.status_code, head.headers["allow"], head.content) == (405, "POST", b"")


@pytest.mark.parametrize(
    "path", ["/", "/v1/models", "/health", "/health/", "/ready", "/version", "/metrics", "/telemetry"]
)
def test_small_routes_answer_get_and_head(server: ServerProcess, path: str) -> None:
    for method in ("POST", "OPTIONS", "DELETE"):
        response = server.client.request(method, path)
        assert_error(response, 405, None, "method_not_allowed")
    head, get = server.client.head(path), server.client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "param", "wrong"),
    [("/telemetry", "since_step", ["-1"]), ("/trace", "seconds", ["0", "-1", "3601", "nan"])],
)
def test_refused_queries(server: ServerProcess, path: str, param: str, wrong: list[str]) -> None:
    assert_error(server.client.get(path, params={param: "soon"}), 400, param, "invalid_type")
    for value in wrong:
        assert_error(server.client.get(path, params={param: value}), 422, param, "invalid_value")
