"""`/v1/responses`: items in and out, and the events of its streams."""

from __future__ import annotations

import json
from typing import Any, get_args

import httpx
import pytest
from openai.types.responses import Response, ResponseIncludable, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.support.servers import (
    MESSAGES,
    ServerProcess,
    answer_of,
    assert_error,
    read_events,
    rendered,
)

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

#: The events of a message, without the pieces of its text.
BEGINS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
ENDS = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
DELTA = "response.output_text.delta"


def assert_known(value: Any) -> None:
    """Assert that OpenAI's types have every field of an answer except `store` and `bytes`. OpenAI sends both."""
    if isinstance(value, BaseModel):
        assert set(value.model_extra or ()) <= {"store", "bytes"}, value.model_extra
        for name in value.model_fields_set:
            assert_known(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            assert_known(each)


def respond(server: ServerProcess, prefix: str = "/v1", **fields: Any) -> dict[str, Any]:
    """Request a response, and check it against OpenAI's types."""
    answer = answer_of(server.ask(f"{prefix}/responses", **fields))
    assert_known(Response.model_validate(answer, strict=True))
    return answer


def text_of(answer: dict[str, Any]) -> str:
    (item,) = answer["output"]
    (part,) = item["content"]
    assert (item["type"], item["role"], part["type"], part["annotations"]) == (
        *("message", "assistant"),
        *("output_text", []),
    )
    return str(part["text"])


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, after checking their types, numbers and names."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    named = list(read_events(response))
    events = [data for _, data in named]
    for number, (name, data) in enumerate(named):
        assert (data["type"], data["sequence_number"]) == (name, number)
        if name != "error":  # an error has its fields twice, once as an object
            assert_known(EVENTS.validate_python(data, strict=True))
    return events


def stream(server: ServerProcess, prefix: str = "/v1", **fields: Any) -> list[dict[str, Any]]:
    return events_of(server.ask(f"{prefix}/responses", **fields, stream=True))


def settled(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a response without the fields that differ between equal answers: ids, times and cached tokens."""
    items = [{name: value for name, value in item.items() if name != "id"} for item in answer["output"]]
    rest = {name: value for name, value in answer.items() if name not in ("id", "created_at", "completed_at")}
    usage = {name: value for name, value in answer["usage"].items() if name != "input_tokens_details"}
    return rest | {"output": items, "usage": usage}


# ---------------------------------------------------------------------- answers


def test_an_answer_continues_the_rendered_conversation(server: ServerProcess, prefix: str) -> None:
    answer = respond(server, prefix, max_output_tokens=20, ignore_eos=True)
    expected = server.complete(prompt=rendered(MESSAGES), max_tokens=20, ignore_eos=True)
    assert text_of(answer) == expected["choices"][0]["text"]
    assert (answer["object"], answer["model"], answer["store"]) == ("response", server.model, True)
    assert answer["id"].startswith("resp_")
    assert answer["output"][0]["id"].startswith("msg_")
    usage = answer["usage"]
    assert usage["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 20
    assert usage["total_tokens"] == usage["input_tokens"] + 20
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_an_answer_without_text_is_a_message(server: ServerProcess) -> None:
    whole = text_of(respond(server, max_output_tokens=8))
    for fields in ({"stop": whole[0]}, {"structured_outputs": {"regex": ""}}):
        assert text_of(respond(server, **fields)) == ""
        events = stream(server, **fields)
        assert [event["type"] for event in events] == [*BEGINS, *ENDS, "response.completed"]


def test_ways_to_write_the_same_input(server: ServerProcess) -> None:
    system, user = (message["content"] for message in MESSAGES)
    plain = settled(respond(server))
    part = {"type": "input_text", "text": user}
    for fields in (
        {"instructions": system, "input": user},
        {"instructions": system, "input": [{"role": "user", "content": [part]}]},
        {"instructions": "", "input": MESSAGES},  # as LlamaIndex sends it
        {
            "input": [
                MESSAGES[0],
                {"type": "message", "role": "user", "content": [part], "status": "completed"},
            ]
        },
    ):
        answer = settled(respond(server, **fields))
        assert answer["output"] == plain["output"]
        assert answer["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
        assert answer["instructions"] == fields.get("instructions")
    two = [{"type": "input_text", "text": text} for text in ("Tell me", " a story.")]
    joined = respond(server, input=[{"role": "user", "content": two}])["usage"]["input_tokens"]
    assert joined == len(rendered([{"role": "user", "content": "Tell me a story."}]))
    rules = [{"role": "developer", "content": "Rules."}, {"type": "reasoning", "summary": []}, MESSAGES[1]]
    merged = respond(server, instructions="Be brief.", input=rules)["usage"]["input_tokens"]
    assert merged == len(rendered([{"role": "system", "content": "Be brief.\n\nRules."}, MESSAGES[1]]))


def test_a_response_repeats_its_settings(server: ServerProcess) -> None:
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "temperature": 0.5,
        "top_p": 0.9,
        "truncation": "auto",
        "user": "u",
        "text": {"format": {"type": "json_object"}},
    }
    answer = respond(server, **fields)
    assert {name: answer[name] for name in fields} == fields
    numbers = respond(server, metadata={"count": 2**70, "text": "2"})
    assert numbers["metadata"] == {"count": str(2**70), "text": "2"}, "values are texts, as with OpenAI"
    plain = respond(server, temperature=None)
    assert (plain["temperature"], plain["top_p"], plain["truncation"]) == (1.0, 1.0, "disabled")
    assert plain["text"] == {"format": {"type": "text"}}


def test_a_response_repeats_integers_of_any_size(server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 2**64}}}
    tools = [{"type": "function", "name": "f", "description": None, "parameters": schema, "strict": True}]
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    fields = {"tools": tools, "text": form}
    streamed = stream(server, **fields)[-1]["response"]
    for answer in (respond(server, **fields), streamed):
        assert {name: answer[name] for name in fields} == fields


def test_a_conversation_too_long_is_cut_if_asked_to(server: ServerProcess) -> None:
    long = [{"role": "user", "content": "A fox, and more. " * 400}]
    response = server.ask("/v1/responses", input=long)
    assert_error(response, 422, "input", says="tokens")
    answer = respond(server, input=long, truncation="auto", max_output_tokens=9, ignore_eos=True)
    assert answer["usage"]["input_tokens"] == 1024 - 9
    answer = respond(server, input=long, truncation="auto", max_output_tokens=32_000, ignore_eos=True)
    assert answer["usage"]["input_tokens"] == 1024 // 2, "half of the context is the conversation's"


# ---------------------------------------------------------------------- streams


def test_a_streams_events_are_openais_in_their_order(server: ServerProcess, prefix: str) -> None:
    events = stream(server, prefix, max_output_tokens=6, ignore_eos=True)
    assert [event["type"] for event in events] == [*BEGINS, *[DELTA] * 6, *ENDS, "response.incomplete"]
    whole = respond(server, prefix, max_output_tokens=6, ignore_eos=True)
    first, last = events[0]["response"], events[-1]["response"]
    assert settled(last) == settled(whole)
    assert first["id"] == last["id"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    text = "".join(event["delta"] for event in events if event["type"] == DELTA)
    assert text == text_of(last)
    done = {event["type"]: event for event in events}
    assert done["response.output_text.done"]["text"] == text
    assert done["response.content_part.done"]["part"] == last["output"][0]["content"][0]
    assert done["response.output_item.done"]["item"] == last["output"][0]
    begun = done["response.output_item.added"]["item"]
    assert begun == last["output"][0] | {"status": "in_progress", "content": []}
    for event in events[3:-2]:
        assert (event["item_id"], event["output_index"], event["content_index"]) == (begun["id"], 0, 0)


# ---------------------------------------------------------------------- tools

FOX: dict[str, Any] = {
    "type": "function",
    "name": "find_fox",
    "description": "Finds a fox.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["forest", "river"]}, "brave": {"type": "boolean"}},
        "required": ["place", "brave"],
        "additionalProperties": False,
    },
}
OWL: dict[str, Any] = {"type": "function", "name": "wake_owl", "parameters": None, "strict": None}
TOOLS = {"tools": [FOX, OWL], "max_output_tokens": 200}


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return name and arguments of each call. All calls must have different ids."""
    items = [item for item in answer["output"] if item["type"] == "function_call"]
    assert len({item[name] for item in items for name in ("id", "call_id")}) == 2 * len(items)
    return [(item["name"], json.loads(item["arguments"])) for item in items]


FILES: dict[str, Any] = {
    "type": "namespace",
    "name": "files",
    "description": "Reads files.",
    "tools": [OWL | {"name": "read"}, {"type": "custom", "name": "patch"}],
}


@pytest.mark.parametrize("choice", ["required", "files__read"])
def test_a_function_of_a_namespace_is_called_by_both_names(server: ServerProcess, choice: str) -> None:
    fields = {
        "tools": [{"type": "web_search"}, FILES],
        "tool_choice": choice if choice == "required" else {"type": "function", "name": choice},
        "parallel_tool_calls": False,
    }
    answer = respond(server, **fields, max_output_tokens=60)
    (item,) = answer["output"]
    assert (item["namespace"], item["name"], item["arguments"]) == ("files", "read", "{}")
    assert answer["tools"] == [
        FILES | {"tools": [{"description": None} | FILES["tools"][0] | {"strict": True}]}
    ]
    events = stream(server, **fields, max_output_tokens=60)
    assert events[-1]["response"]["output"][0]["namespace"] == "files"
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
    body = {"input": [*MESSAGES, item, result], "tools": fields["tools"], "max_output_tokens": 1}
    spelled = item | {"namespace": None, "name": "files__read"}
    again, same = (respond(server, **body | {"input": [*MESSAGES, each, result]}) for each in (item, spelled))
    assert again["usage"]["input_tokens"] == same["usage"]["input_tokens"]


def test_skipped_tools_are_named_as_unknown_fields_are(server: ServerProcess) -> None:
    skipped = [{"type": f"kind_{number}"} for number in range(20)]
    for tools, named in (
        ([{"type": "web_search"}, FILES], "tools[0].web_search,tools[1].tools[1].custom"),
        (skipped, ",".join(f"tools[{number}].kind_{number}" for number in range(16))),
    ):
        answer = server.ask("/v1/responses", tools=tools, max_output_tokens=1)
        assert (answer.status_code, answer.headers["x-infer-ignored"]) == (200, named)


def test_openais_values_of_include_are_taken(server: ServerProcess) -> None:
    """Those of tools that are skipped are named as the tools are: the AI SDK adds one to each search of the web."""
    values = get_args(ResponseIncludable)
    answer = server.ask("/v1/responses", include=values, max_output_tokens=1)
    ignored = [
        f"include[{number}].{value}"
        for number, value in enumerate(values)
        if value not in ("message.output_text.logprobs", "reasoning.encrypted_content")
    ]
    assert (answer.status_code, answer.headers["x-infer-ignored"]) == (200, ",".join(ignored))


def test_log_probabilities_are_those_of_chat_also_in_the_last_event(server: ServerProcess) -> None:
    """Programs that stream, such as Inspect, read them in the whole response."""
    fields = {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "max_output_tokens": 8}
    chat = server.ask("/v1/chat/completions", logprobs=True, top_logprobs=2, max_tokens=8).json()
    events = stream(server, **fields)
    pieces = [entry for event in events if event["type"] == DELTA for entry in event["logprobs"]]
    assert pieces == chat["choices"][0]["logprobs"]["content"]
    for answer in (events[-1]["response"], respond(server, **fields)):
        assert answer["output"][0]["content"][0]["logprobs"] == pieces


def test_a_streamed_call_has_openais_events(server: ServerProcess) -> None:
    fields = {**TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = respond(server, **fields)
    events = stream(server, **fields)
    names = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(names)) == [
        *("created", "in_progress", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"),
    ]
    last = events[-1]["response"]
    assert calls_of(last) == calls_of(whole)
    by_name = dict(zip(names, events, strict=True))
    (call,) = last["output"]
    assert by_name["output_item.added"]["item"] == call | {"status": "in_progress", "arguments": ""}
    assert by_name["output_item.done"]["item"] == call
    assert by_name["function_call_arguments.done"]["arguments"] == call["arguments"]
    deltas = [event["delta"] for name, event in zip(names, events, strict=True) if name.endswith(".delta")]
    assert "".join(deltas) == call["arguments"]
    assert {event["item_id"] for event in events if "item_id" in event} == {call["id"]}


def test_a_call_that_is_cut_off_is_incomplete(server: ServerProcess) -> None:
    fields = TOOLS | {"max_output_tokens": 14, "tool_choice": {"type": "function", "name": "find_fox"}}
    answer = respond(server, **fields)
    assert (answer["status"], answer["output"][-1]["status"]) == ("incomplete", "incomplete")
    stopped = respond(server, **fields | {"max_output_tokens": 100, "stop": "place"})
    assert (stopped["status"], stopped["output"][-1]["status"]) == ("completed", "incomplete")
