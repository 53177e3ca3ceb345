"""Tool calls over HTTP: every way to ask for one, whole and streamed, with the fields that stand beside them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from tests.server.support import MESSAGES, ServerProcess, assert_error

SCHEMAS: dict[str, dict[str, Any]] = {
    "find_fox": {
        "type": "object",
        "properties": {"place": {"enum": ["forest", "river"]}, "count": {"type": "integer", "maximum": 99}},
        "required": ["place", "count"],
        "additionalProperties": False,
    },
    "wait": {"type": "object", "properties": {"sure": {"type": "boolean"}}, "additionalProperties": False},
}


def tools(**fields: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema} | fields}
        for name, schema in SCHEMAS.items()
    ]


REQUIRED = {"tools": tools(), "tool_choice": "required", "max_tokens": 200}
NAMED = REQUIRED | {"tool_choice": {"type": "function", "function": {"name": "wait"}}}
ONE = REQUIRED | {"parallel_tool_calls": False}
PATH = "/v1/chat/completions"


def whole(server: ServerProcess, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a JSON answer."""
    response = server.ask(PATH, stream=False, **fields)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def streamed(server: ServerProcess, **fields: Any) -> list[dict[str, Any]]:
    """The choices that a stream's deltas add up to."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in server.chunks("/openai" + PATH, **fields):
        for part in chunk["choices"]:
            choice = found.setdefault(part["index"], {"content": "", "calls": [], "logprobs": []})
            delta = part["delta"]
            choice["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(choice["calls"]):
                    assert call["type"] == "function"
                    assert call["id"]
                    choice["calls"].append({"name": call["function"]["name"], "arguments": ""})
                choice["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            choice["logprobs"] += (part["logprobs"] or {}).get("content") or []
            assert "finish_reason" not in choice, "the last chunk of a choice is its last"
            if part["finish_reason"] is not None:
                choice["finish_reason"] = part["finish_reason"]
    return [found[index] for index in sorted(found)]


def calls_of(choice: dict[str, Any]) -> list[dict[str, str]]:
    return [call["function"] for call in choice["message"].get("tool_calls") or ()]


@pytest.mark.parametrize("asked", [REQUIRED, NAMED, ONE], ids=["required", "named", "one"])
@pytest.mark.parametrize(("n", "logprobs"), [(1, False), (3, True)])
def test_required_calls_follow_their_schemas_whole_and_streamed(
    server: ServerProcess, asked: dict[str, Any], n: int, logprobs: bool
) -> None:
    fields = asked | {"n": n, "temperature": 1, "seed": 7, "logprobs": logprobs}
    choices, added = whole(server, **fields), streamed(server, **fields)
    assert len(choices) == len(added) == n
    for choice, sums in zip(choices, added, strict=True):
        calls = calls_of(choice)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert (sums["finish_reason"], sums["content"], sums["calls"]) == ("tool_calls", "", calls)
        assert len(calls) == 1 if asked is ONE else calls
        for call in calls:
            assert asked is not NAMED or call["name"] == "wait"
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
        said = choice["logprobs"]["content"] if logprobs else []
        assert [each["token"] for each in sums["logprobs"]] == [each["token"] for each in said]
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids)


def test_a_call_that_is_cut_off_says_so(server: ServerProcess) -> None:
    (full,) = whole(server, **ONE)
    length = len(
        server.client.post("/tokenize", json={"prompt": calls_of(full)[0]["arguments"]}).json()["tokens"]
    )
    for max_tokens in range(1, length + 12):
        fields = ONE | {"max_tokens": max_tokens}
        (choice,), (sums,) = whole(server, **fields), streamed(server, **fields)
        assert sums["finish_reason"] == choice["finish_reason"]
        assert sums["calls"] == calls_of(choice)
        if choice["finish_reason"] == "length":
            begun = "".join(call["arguments"] for call in calls_of(choice))
            assert calls_of(full)[0]["arguments"].startswith(begun)
        else:
            assert calls_of(choice) == calls_of(full)


def test_a_stop_string_ends_a_call(server: ServerProcess) -> None:
    fields = ONE | {"stop": ['"place"']}
    (choice,), (sums,) = whole(server, **fields), streamed(server, **fields)
    assert (choice["finish_reason"], sums["finish_reason"]) == ("stop", "stop") or calls_of(choice)
    assert sums["calls"] == calls_of(choice)
    assert all('"place"' not in call["arguments"] for call in calls_of(choice))


def test_a_model_is_free_to_answer_with_text(server: ServerProcess) -> None:
    for choice in ("auto", "none", None):
        for strict in (False, True):
            fields = {"tools": tools(strict=strict), "tool_choice": choice, "max_tokens": 12}
            (said,) = whole(server, **fields)
            (sums,) = streamed(server, **fields)
            assert sums["content"] == (said["message"]["content"] or "")
            assert sums["calls"] == calls_of(said)
    assert calls_of(whole(server, tools=tools(), tool_choice="none", max_tokens=30)[0]) == []


def test_results_go_back_and_the_model_goes_on(server: ServerProcess) -> None:
    (choice,) = whole(server, **REQUIRED)
    messages = [*MESSAGES, choice["message"]]
    for call, number in zip(choice["message"]["tool_calls"], itertools.count()):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"})
    (after,) = whole(server, tools=tools(), messages=messages, max_tokens=8)
    assert after["finish_reason"] in ("stop", "length", "tool_calls")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a tool that is not there": (
        REQUIRED | {"tool_choice": {"type": "function", "function": {"name": "fly"}}},
        "tool_choice",
    ),
    "a choice that does not exist": (REQUIRED | {"tool_choice": "sometimes"}, "tool_choice"),
    "a name with a space": (
        {"tools": [{"type": "function", "function": {"name": "find fox"}}]},
        "tools",
    ),
    "an invalid schema": (
        REQUIRED
        | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "fox"}}}]},
        "tools[0]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_refused_by_name(server: ServerProcess, name: str) -> None:
    fields, param = WRONG[name]
    response = server.ask(PATH, stream=False, **fields)
    assert_error(response, 422, param, response.json()["error"]["code"])
    server.assert_serves()
