"""Fields that are unknown, that change nothing, or that are known and not implemented."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.responses import ResponseTextConfigParam
from openai.types.shared_params import Reasoning as ReasoningParam

from common.server.api.bodies import HINTS, MOST_NAMES, UNIMPLEMENTED, Body, Limits, parse
from common.server.api.chat import ChatRequest
from common.server.api.completions import CompletionRequest
from common.server.api.messages import MessagesRequest
from common.server.api.responses import ReasoningOptions, ResponsesRequest, TextOptions
from common.server.api.wanted import StreamOptions
from common.server.errors import ApiError
from tests.support.servers import ServerProcess, app_with, assert_error

LIMITS = Limits(models=("served",), max_choices=64, vocab_size=1000)
STRICT = Limits(models=("served",), max_choices=64, vocab_size=1000, strict_fields=True)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who was known by these fields?"}]}
COMPLETION: dict[str, Any] = {"prompt": "The fields were known to"}
RESPONSE: dict[str, Any] = {"input": "Which fields are known?"}

Place = tuple[type[Body], Callable[[dict[str, Any]], dict[str, Any]]]

#: For each place of `UNIMPLEMENTED` and `HINTS`, a body that has it, and how to put fields there.
PLACES: dict[str, Place] = {
    "everywhere": (ResponsesRequest, lambda fields: RESPONSE | fields),
    "all bodies": (CompletionRequest, lambda fields: COMPLETION | fields),
    "completions": (CompletionRequest, lambda fields: COMPLETION | fields),
    "conversations": (ChatRequest, lambda fields: CHAT | fields),
    "responses, Anthropic's messages": (ResponsesRequest, lambda fields: RESPONSE | fields),
    "Anthropic's messages": (MessagesRequest, lambda fields: CHAT | fields),
    "responses": (ResponsesRequest, lambda fields: RESPONSE | fields),
    "messages": (
        ChatRequest,
        lambda fields: {"messages": [{"role": "assistant", "content": "I."} | fields]},
    ),
    "structured_outputs": (
        ChatRequest,
        lambda fields: CHAT | {"structured_outputs": {"regex": "a"} | fields},
    ),
    "reasoning": (ResponsesRequest, lambda fields: RESPONSE | {"reasoning": fields}),
    "items": (ResponsesRequest, lambda fields: {"input": [{"role": "user", "content": "Hello"} | fields]}),
    "tools of Anthropic's messages": (
        MessagesRequest,
        lambda fields: CHAT | {"tools": [{"name": "f", "input_schema": {}} | fields]},
    ),
    "tools of responses": (
        ResponsesRequest,
        lambda fields: RESPONSE | {"tools": [{"type": "function", "name": "f"} | fields]},
    ),
    "stream_options": (ChatRequest, lambda fields: CHAT | {"stream": True, "stream_options": fields}),
}

#: Values of every type.
VALUES: list[Any] = [True, False, 0, 3, 2.5, "x", "high", ["x"], [{}], {"type": "x"}]


def send(form: type[Body], body: dict[str, Any], limits: Limits = STRICT) -> Body:
    return parse(json.dumps(body).encode(), form, limits)


# ---------------------------------------------------------------------- unknown fields


def test_unknown_fields_are_ignored_and_named(server: ServerProcess) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x-own": 1}, "color": 1}, "icon": 2}
    part = {"type": "text", "text": "Tell me a story.", "weight": 1}
    plain = CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]}]}
    unknown = plain | {
        "top": {"deep": [1]},
        "messages": [{"role": "user", "content": [part, part | {"text": ""}], "mood": None}],
        "stream_options": {"chunk": 1},
        "ev\r\nil,\u2603": 1,
    }
    asked = {"max_tokens": 4, "temperature": 0}
    expected = server.client.post("/v1/chat/completions", json=plain | asked)
    assert "x-infer-ignored" not in expected.headers
    answer = server.client.post("/v1/chat/completions", json=unknown | asked)
    assert set(answer.headers["x-infer-ignored"].split(",")) == {
        *("top", "messages[0].mood", "messages[0].content[0].weight", "stream_options.chunk", "ev??il??"),
    }
    assert answer.json()["choices"] == expected.json()["choices"]
    streamed = server.client.post("/v1/chat/completions", json=unknown | asked | {"stream": True})
    assert streamed.headers["x-infer-ignored"] == answer.headers["x-infer-ignored"]
    with_tool = server.client.post("/v1/chat/completions", json=plain | asked | {"tools": [tool]})
    ignored = "tools[0].icon,tools[0].function.color"
    assert sorted(with_tool.headers["x-infer-ignored"].split(",")) == sorted(ignored.split(","))
    for path, body in (("/tokenize", COMPLETION), ("/detokenize", {"tokens": [5]})):
        answer = server.client.post(path, json=body | {"own": 1})
        assert (answer.status_code, answer.headers["x-infer-ignored"]) == (200, "own")
    assert server.log_text.count("messages[].content[].weight") == 1


def test_made_up_names_fill_neither_header_nor_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), app_with() as client:
        fields = {f"{number}-" + "x" * 2000: 1 for number in range(50)}
        for _ in range(2):
            answer = client.post(
                "/v1/completions", json=COMPLETION | {"max_tokens": 1, "stream": False} | fields
            )
            assert answer.status_code == 200
            named = answer.headers["x-infer-ignored"].split(",")
            assert len(named) == MOST_NAMES
            assert all(len(name) < 100 for name in named)
    (line,) = [message for message in caplog.messages if message.startswith("unknown fields")]
    assert line.count("xxx?") == MOST_NAMES


def test_strict_fields_refuses_them() -> None:
    with app_with(strict_fields=True) as client:
        for fields, param in (
            ({"foo": None}, "foo"),
            ({"x" * 5000: 1}, "x" * 99 + "…"),
            ({"messages": [CHAT["messages"][0] | {"mood": 1}]}, "messages[0].mood"),
        ):
            refused = client.post("/v1/chat/completions", json=CHAT | fields)
            assert_error(refused, 422, param, "unknown_field")
        assert client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1}).status_code == 200


# ---------------------------------------------------------------------- fields that are not implemented


@pytest.mark.parametrize("place", UNIMPLEMENTED)
def test_neutral_values_are_accepted_and_others_refused_by_name(place: str) -> None:
    form, body = PLACES[place]
    for name, line in UNIMPLEMENTED[place].items():
        neutral = (None, *line.neutral)
        for value in neutral:
            assert not send(form, body({name: value})).ignored
        for value in VALUES:
            if json.dumps(value) in map(json.dumps, neutral):
                continue
            with pytest.raises(ApiError) as error:
                send(form, body({name: value}), LIMITS)
            assert error.value.message.startswith(f"{error.value.param}: ")
            assert str(error.value.param).rpartition(".")[2] == name
            if name not in form.model_fields:  # such a field may have a wrong type, too
                assert (error.value.status, error.value.code) == (422, "invalid_value")
                assert line.reason in error.value.message


@pytest.mark.parametrize("place", HINTS)
def test_hints_are_accepted_with_any_value(place: str) -> None:
    form, body = PLACES[place]
    for value in VALUES:
        assert not send(form, body(dict.fromkeys(HINTS[place], value))).ignored


# ---------------------------------------------------------------------- fields of OpenAI, Anthropic and vLLM


def test_every_field_of_the_vendors_libraries_is_known() -> None:
    import anthropic  # takes two seconds

    client = openai.OpenAI(api_key="none", base_url="http://localhost:1")
    for form, create in (
        (ChatRequest, client.chat.completions.create),
        (CompletionRequest, client.completions.create),
        (ResponsesRequest, client.responses.create),
        (MessagesRequest, anthropic.Anthropic(api_key="none").messages.create),
    ):
        not_sent = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
        assert set(inspect.signature(create).parameters) - not_sent <= known(form), form
    for form, fields in (
        (ReasoningOptions, ReasoningParam),
        (TextOptions, ResponseTextConfigParam),
        (StreamOptions, ChatCompletionStreamOptionsParam),
    ):
        assert set(fields.__annotations__) <= known(form), form


def known(form: Any) -> set[str]:
    names = set(form.model_fields) | HINTS["everywhere"]
    for place in getattr(form, "places", ()):
        names |= UNIMPLEMENTED.get(place, {}).keys() | HINTS.get(place, set())
    return names


#: Fields of vLLM's requests at vLLM's defaults other than null, those of both bodies first. From its `protocol.py`,
#: 0.8 to 0.20.
VLLM_BOTH: dict[str, Any] = {
    "bad_words": [],
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "min_p": 0.0,
    "min_tokens": 0,
    "n": 1,
    "presence_penalty": 0.0,
    "priority": 0,
    "repetition_penalty": 1.0,
    "return_token_offsets": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop": [],
    "stop_token_ids": [],
    "stream": False,
    "top_k": 0,
    "use_beam_search": False,
}
VLLM_CHAT: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "continue_final_message": False,
    "echo": False,
    "include_reasoning": True,
    "logprobs": False,
    "parallel_tool_calls": True,
    "return_assistant_tokens_mask": False,
    "tool_choice": "none",
    "top_k": -1,
    "top_logprobs": 0,
}
VLLM_COMPLETION: dict[str, Any] = {
    "add_special_tokens": True,
    "echo": False,
    "max_tokens": 16,
}


def test_nulls_and_vllms_defaults_change_nothing(server: ServerProcess) -> None:
    message = CHAT["messages"][0] | {"tool_calls": [], "tool_call_id": None}
    for path, form, plain, fields in (
        ("chat/completions", ChatRequest, CHAT, VLLM_BOTH | VLLM_CHAT | {"messages": [message]}),
        ("completions", CompletionRequest, COMPLETION, VLLM_BOTH | VLLM_COMPLETION),
    ):
        plain = plain | {"stream": False, "max_tokens": 4, "temperature": 0}
        expected = server.client.post(f"/v1/{path}", json=plain).json()["choices"]
        for body in (plain | fields | {"max_tokens": 4}, dict.fromkeys(known(form)) | plain):
            answer = server.client.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            assert "x-infer-ignored" not in answer.headers
            assert answer.json()["choices"] == expected


# ---------------------------------------------------------------------- values of other clients

LABELS: dict[str, Any] = {
    "user": "tenant 7",
    "safety_identifier": "c0ffee",
    "prompt_cache_key": "stories",
    "metadata": {"experiment": "x" * 2000, "trace": {"span": 5}} | {str(number): "" for number in range(50)},
}


SCHEMA = {"type": "object", "properties": {"fox": {"type": "boolean"}}, "required": ["fox"]}
FORM = {"type": "json_schema", "json_schema": {"name": "fox", "schema": SCHEMA}}

#: Fields as other servers take them, and the same in this server's own form.
SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("completions", LABELS, {}),
    ("chat/completions", LABELS, {}),
    ("completions", {"max_tokens": 9.0, "n": 2.0, "top_k": 1.0}, {"max_tokens": 9, "n": 2, "top_k": 1}),
    ("completions", {"temperature": 1.5, "top_p": 0}, {"temperature": 0}),
    ("completions", {"stop": ["", " the"]}, {"stop": " the"}),
    ("completions", {"stop": ""}, {"stop": []}),
    ("completions", {"logprobs": False, "stream_options": {"include_usage": True}}, {}),
    (
        "completions",
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": FORM},
    ),
    ("completions", {"response_format": {"type": "json_object", "value": SCHEMA}}, {"response_format": FORM}),
    (
        "completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"response_format": FORM},
    ),
    ("chat/completions", {"max_tokens": -1, "stop": " the"}, {"max_tokens": None, "stop": " the"}),
    ("chat/completions", {"reasoning_effort": "low", "verbosity": "high"}, {}),
    ("chat/completions", {"store": True, "tool_choice": "auto", "parallel_tool_calls": False}, {}),
    ("responses", {"response_format": FORM}, {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("responses", {"reasoning": {"effort": "none"}, "text": {"verbosity": "low"}, "n": 1, "store": True}, {}),
]


@pytest.mark.parametrize(("path", "theirs", "ours"), SAME, ids=lambda value: str(value)[:60])
def test_values_of_other_clients_are_taken(
    server: ServerProcess, path: str, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    said = []
    for fields in (theirs, ours):
        answer = server.ask(f"/v1/{path}", stream=False, **fields)
        assert answer.status_code == 200, answer.text
        assert "x-infer-ignored" not in answer.headers
        output = answer.json().get("choices") or answer.json()["output"]
        said.append([each | {"id": ""} for each in output])
    assert said[0] == said[1]


def test_more_new_tokens_than_fit_are_cut(server: ServerProcess) -> None:
    long = [{"role": "user", "content": "A fox, and more. " * 120}]
    for path, field, most in (
        ("chat/completions", "max_tokens", 1024),
        ("chat/completions", "max_completion_tokens", 10**6),
        ("responses", "max_output_tokens", 32_000),
    ):
        asked = {"messages": long, "max_tokens": None} if path == "chat/completions" else {"input": long}
        answer = server.ask(f"/v1/{path}", ignore_eos=True, **asked | {field: most}).json()
        assert answer["usage"]["total_tokens"] == 1024


def test_special_tokens_are_added_or_not(server: ServerProcess) -> None:
    def prompt_tokens(path: str, **fields: Any) -> int:
        response = server.client.post(path, json={"max_tokens": 1, "stream": False} | fields)
        tokens: int = response.json()["usage"]["prompt_tokens"]
        return tokens

    counts = [
        prompt_tokens("/v1/completions", **COMPLETION, add_special_tokens=add) for add in (None, True, False)
    ]
    assert counts == [counts[0], counts[0], counts[0] - 1]
    counts = [
        prompt_tokens("/v1/chat/completions", **CHAT, add_special_tokens=add) for add in (None, False, True)
    ]
    assert counts == [counts[0], counts[0], counts[0] + 1]
