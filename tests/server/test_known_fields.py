"""Fields that clients send and the server does not implement: neutral values are accepted, others refused by name.

Every line of the tables in `common.server.requests.known_fields` is sent.
"""

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
from pydantic import BaseModel

from common.server.bodies import Body, Limits, parse
from common.server.errors import ApiError
from common.server.requests.chat import ChatRequest
from common.server.requests.completions import CompletionRequest
from common.server.requests.known_fields import TABLES, Neutral, lines_of
from common.server.requests.responses import ReasoningOptions, ResponsesRequest, TextOptions
from common.server.requests.tokens import TokenizeRequest
from docs.building.options import unimplemented_fields_table
from tests.server.support import PREFIXES, ServerProcess, assert_error

LIMITS = Limits(models=("served",), max_choices=64, vocab_size=1000)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who was known by these fields?"}]}
COMPLETION: dict[str, Any] = {"prompt": "The fields were known to"}
RESPONSE: dict[str, Any] = {"input": "Which fields are known?"}

ITEM: dict[str, Any] = {"role": "user", "content": "Hello"}
PART: dict[str, Any] = {"type": "input_text", "text": "Hello"}

Place = tuple[type[Body], Callable[[dict[str, Any]], dict[str, Any]]]

IN_CHAT: Place = (ChatRequest, lambda fields: CHAT | fields)
IN_COMPLETIONS: Place = (CompletionRequest, lambda fields: COMPLETION | fields)
IN_RESPONSES: Place = (ResponsesRequest, lambda fields: RESPONSE | fields)

#: For each table, the bodies that have its fields, and how to put fields into one.
PLACES: dict[str, list[Place]] = {
    "chat": [IN_CHAT],
    "completions": [IN_COMPLETIONS],
    "responses": [IN_RESPONSES],
    "`text` of responses": [(ResponsesRequest, lambda fields: RESPONSE | {"text": fields})],
    "`reasoning` of responses": [(ResponsesRequest, lambda fields: RESPONSE | {"reasoning": fields})],
    "`input` of responses": [(ResponsesRequest, lambda fields: {"input": [ITEM | fields]})],
    "`tools` of responses": [
        (ResponsesRequest, lambda fields: RESPONSE | {"tools": [{"type": "function", "name": "f"} | fields]})
    ],
    "parts of an `input`": [
        (ResponsesRequest, lambda fields: {"input": [ITEM | {"content": [PART | fields]}]})
    ],
    "all three (vLLM)": [IN_CHAT, IN_COMPLETIONS, IN_RESPONSES],
    "chat (vLLM)": [IN_CHAT],
    "completions (vLLM)": [IN_COMPLETIONS],
    "chat, responses and `/tokenize`": [
        *(IN_CHAT, IN_RESPONSES),
        (TokenizeRequest, lambda fields: CHAT | fields),
    ],
    "`stream_options`": [
        (form, lambda fields, body=body: body | {"stream": True, "stream_options": fields})  # type: ignore[misc]
        for form, body in ((ChatRequest, CHAT), (CompletionRequest, COMPLETION), (ResponsesRequest, RESPONSE))
    ],
    "`structured_outputs`": [
        (form, lambda fields, body=body: body | {"structured_outputs": {"regex": "a"} | fields})  # type: ignore[misc]
        for form, body in ((ChatRequest, CHAT), (CompletionRequest, COMPLETION), (ResponsesRequest, RESPONSE))
    ],
    "`messages`": [
        (ChatRequest, lambda fields: {"messages": [{"role": "assistant", "content": "I."} | fields]})
    ],
}

LINES = [
    pytest.param(title, name, line, id=f"{title}: {name}")
    for title, table in TABLES.items()
    for name, line in lines_of(table).items()
]

#: Values of every type. A line of the tables accepts those of them that it names.
VALUES: list[Any] = [True, False, 0, 3, 2.5, "x", "high", ["x"], [{}], {"type": "x"}]


def send(form: type[Body], body: dict[str, Any]) -> Body:
    return parse(json.dumps(body).encode(), form, LIMITS)


def is_neutral(line: Neutral, value: Any) -> bool:
    return json.dumps(value) in {json.dumps(each) for each in line.values}


@pytest.mark.parametrize(("title", "name", "line"), LINES)
def test_neutral_values_are_accepted_and_others_refused_by_name(title: str, name: str, line: Neutral) -> None:
    assert None in line.values
    for form, body in PLACES[title]:
        for value in line.values:
            send(form, body({name: value}))
        refused = [value for value in VALUES if not is_neutral(line, value)]
        assert refused
        for value in refused:
            with pytest.raises(ApiError) as error:
                send(form, body({name: value}))
            assert (error.value.status, error.value.code) == (422, "invalid_value")
            assert error.value.param == error.value.message.split(": ")[0]
            assert error.value.param.rpartition(".")[2] == name
            assert line.reason in error.value.message


def test_numbers_stand_for_no_booleans() -> None:
    for fields in ({"store": 0}, {"parallel_tool_calls": 1}, {"length_penalty": True}):
        with pytest.raises(ApiError, match=next(iter(fields))):
            send(ChatRequest, CHAT | fields)
    send(ChatRequest, CHAT | {"length_penalty": 1})


# ---------------------------------------------------------------------- fields of OpenAI and vLLM


def arguments(create: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(create).parameters) - {
        "self",
        "extra_headers",
        "extra_query",
        "extra_body",
        "timeout",
    }


def names(form: type[BaseModel]) -> set[str]:
    return set(form.model_fields)


def test_every_field_of_openais_library_is_known() -> None:
    client = openai.OpenAI(api_key="none", base_url="http://localhost:1")
    assert arguments(client.chat.completions.create) <= names(ChatRequest)
    assert arguments(client.completions.create) <= names(CompletionRequest)
    assert arguments(client.responses.create) <= names(ResponsesRequest)
    assert set(ReasoningParam.__annotations__) <= names(ReasoningOptions)
    assert set(ResponseTextConfigParam.__annotations__) <= names(TextOptions)
    options = ChatRequest.model_fields["stream_options"].annotation
    (stream_options,) = (each for each in options.__args__ if each is not type(None))  # type: ignore[union-attr]
    assert set(ChatCompletionStreamOptionsParam.__annotations__) <= names(stream_options)


def nulls(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split())


#: Fields of vLLM's requests at vLLM's defaults, those of both bodies first. From its `protocol.py`, 0.8 to 0.20.
VLLM_BOTH: dict[str, Any] = nulls(
    "add_special_tokens allowed_token_ids cache_salt ec_transfer_params guided_choice "
    "guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern "
    "kv_transfer_params logit_bias logits_processors model prompt_logprobs repetition_detection "
    "request_id response_format return_token_ids return_tokens_as_token_ids seed stream_options "
    "structural_tag structured_outputs temperature thinking_token_budget top_p truncate_prompt_tokens "
    "truncation_side user vllm_xargs"
) | {
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
VLLM_CHAT: dict[str, Any] = nulls(
    "best_of chat_template chat_template_kwargs documents max_completion_tokens max_tokens "
    "media_io_kwargs mm_processor_kwargs reasoning_effort return_prompt_text tools"
) | {
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
VLLM_COMPLETION: dict[str, Any] = nulls("best_of logprobs prompt_embeds suffix") | {
    "add_special_tokens": True,
    "echo": False,
    "max_tokens": 16,
}


def neutral(*titles: str) -> dict[str, Any]:
    """Return the last neutral value of every field of these tables."""
    return {name: line.values[-1] for title in titles for name, line in lines_of(TABLES[title]).items()}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_everything_at_its_neutral_value_changes_nothing(server: ServerProcess, prefix: str) -> None:
    both, stream = neutral("all three (vLLM)"), {"stream_options": neutral("`stream_options`")}
    message = CHAT["messages"][0] | {"tool_calls": [], "tool_call_id": None} | neutral("`messages`")
    # OpenAI's own table comes last: fields that it shares with vLLM's get OpenAI's neutral value.
    chat = VLLM_BOTH | both | VLLM_CHAT | neutral("chat, responses and `/tokenize`", "chat (vLLM)", "chat")
    completion = VLLM_BOTH | both | VLLM_COMPLETION | neutral("completions (vLLM)", "completions")
    for path, plain, fields in (
        ("chat/completions", CHAT | {"stream": False}, chat | {"messages": [message]}),
        ("completions", COMPLETION | {"stream": False}, COMPLETION | completion),
    ):
        asked = {"max_tokens": 4, "temperature": 0}
        answers = [
            server.client.post(f"{prefix}/{path}", json=body | asked).json()["choices"]
            for body in (plain, fields)
        ]
        assert answers[0] == answers[1]
        streamed = server.client.post(f"{prefix}/{path}", json=fields | asked | stream | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream"), streamed.text


@pytest.mark.parametrize("prefix", PREFIXES)
def test_responses_take_everything_at_its_neutral_value(server: ServerProcess, prefix: str) -> None:
    part = {"type": "input_text", "text": RESPONSE["input"]} | neutral("parts of an `input`")
    item = {"role": "user", "content": [part]} | neutral("`input` of responses")
    fields = VLLM_BOTH | neutral("all three (vLLM)", "chat, responses and `/tokenize`", "responses")
    fields |= {"input": [item], "stream_options": neutral("`stream_options`")}
    fields |= {name: neutral(f"`{name}` of responses") for name in ("text", "reasoning")}
    fields |= {"tools": [], "include": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}}
    fields |= {"top_logprobs": 0, "truncation": "disabled", "instructions": None}
    asked = {"max_output_tokens": 4, "temperature": 0}
    said = [
        server.client.post(f"{prefix}/responses", json=body | asked).json()["output"][0]["content"]
        for body in (RESPONSE, fields)
    ]
    assert said[0] == said[1]


# ---------------------------------------------------------------------- labels, and values that mean "all"


LABELS: dict[str, Any] = {
    "user": "tenant 7",
    "safety_identifier": "c0ffee",
    "prompt_cache_key": "stories",
    "metadata": {"experiment": "x" * 512, "n" * 64: ""},
}


def test_labels_change_nothing(server: ServerProcess) -> None:
    plain = server.complete(prompt="Labels on")["choices"]
    assert server.complete(prompt="Labels on", **LABELS)["choices"] == plain
    response = server.client.post("/openai/v1/chat/completions", json=CHAT | LABELS | {"max_tokens": 1})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"safety_identifier": "x" * 257}, 422),
        ({"prompt_cache_key": 5}, 400),
        ({"metadata": []}, 400),
        ({"metadata": {"a": 5}}, 422),
        ({"metadata": {"a": "x" * 513}}, 422),
        ({"metadata": {"n" * 65: "x"}}, 422),
        ({"metadata": {str(i): "x" for i in range(17)}}, 422),
    ],
    ids=lambda value: str(value)[:30],
)
def test_labels_are_bounded(fields: dict[str, Any], status: int) -> None:
    for form, body in (IN_CHAT, IN_COMPLETIONS, IN_RESPONSES):
        with pytest.raises(ApiError) as error:
            send(form, body(fields))
        assert (error.value.status, error.value.param) == (status, next(iter(fields)))


def test_top_k_of_no_tokens_means_all(server: ServerProcess) -> None:
    fields: dict[str, Any] = {"prompt": "All of", "temperature": 1.5, "seed": 5, "max_tokens": 12}
    expected = server.complete(**fields)["choices"]
    for top_k in (0, -1, None):
        assert server.complete(**fields, top_k=top_k)["choices"] == expected
    assert server.complete(**fields, top_k=1)["choices"] != expected
    assert_error(server.post(top_k=-2), 422, "top_k")


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


# ---------------------------------------------------------------------- the page


def test_the_page_has_every_line() -> None:
    rows = [row.split("|")[1:-1] for row in unimplemented_fields_table().splitlines()[2:]]
    shown = {(where.strip(), name.strip().strip("`")) for name, where, *_ in rows}
    assert shown == {(title, name) for title, table in TABLES.items() for name in lines_of(table)}
    assert len(rows) == len(LINES)
