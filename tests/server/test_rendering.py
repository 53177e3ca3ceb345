"""How conversations are rendered: what clients send back, and that the time follows from their length."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import pytest

from common.models.registry import open_checkpoint
from common.server.api.bodies import Body, Limits, parse
from common.server.api.chat import ChatRequest
from common.server.api.messages import MessagesRequest
from common.server.api.responses import ResponsesRequest
from common.server.errors import ApiError
from common.text.dialect import Dialect

LONG = "x" * 1_500_000 + "🦊"  # a wide character makes each copy four times as large
QUESTION = {"role": "user", "content": "hi"}
CALL = {"id": "a", "function": {"name": "f", "arguments": "{}"}}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "a", "content": text}


def developer(text: str) -> dict[str, Any]:
    return {"role": "developer", "content": text}


CALLED = [QUESTION, {"role": "assistant", "tool_calls": [CALL]}]
CONVERSATIONS: dict[str, tuple[type[Body], str, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "reasoning": (ResponsesRequest, "input", [QUESTION, reasoning(LONG)], [reasoning("y")] * 2000),
    "results": (ChatRequest, "messages", [*CALLED, result(LONG)], [result("")] * 2000),
    "developers": (ChatRequest, "messages", [developer(LONG)], [developer("")] * 2000),
}


@functools.cache
def dialect() -> Dialect:
    return Dialect.of(open_checkpoint("zoo:llama-tiny").tokenizer())


def prompts(form: type[Body], field: str, turns: list[dict[str, Any]]) -> Any:
    limits = Limits(models=("m",), max_choices=64, vocab_size=1024)
    length = {"max_tokens": 9} if form is MessagesRequest else {}
    request: Any = parse(json.dumps({field: turns} | length).encode(), form, limits)
    return request.prompts(dialect())


#: Turns as clients' libraries send them back, and the same turns without the fields that the libraries add.
SENT_BACK: dict[str, tuple[type[Body], str, dict[str, Any], dict[str, Any]]] = {
    "openai's parse": (
        ChatRequest,
        "messages",
        {"role": "assistant", "content": "Hi.", "parsed": {"a": 1}, "refusal": None},
        {"role": "assistant", "content": "Hi."},
    ),
    "openai's parse with a tool": (
        ChatRequest,
        "messages",
        {
            "role": "assistant",
            "tool_calls": [{**CALL, "function": CALL["function"] | {"parsed_arguments": {}}}],
        },
        {"role": "assistant", "tool_calls": [CALL]},
    ),
    "huggingface_hub": (
        ChatRequest,
        "messages",
        {"role": "assistant", "tool_calls": [{**CALL, "function": CALL["function"] | {"description": None}}]},
        {"role": "assistant", "tool_calls": [CALL]},
    ),
    "the Agents SDK in JavaScript": (
        ResponsesRequest,
        "input",
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi.", "role": "assistant"}]},
        {"role": "assistant", "content": "Hi."},
    ),
    "reasoning without text": (
        ResponsesRequest,
        "input",
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "reasoning", "content": []},
    ),
}


@pytest.mark.parametrize("client", SENT_BACK)
def test_turns_come_back_as_clients_change_them(client: str) -> None:
    form, field, sent, plain = SENT_BACK[client]
    rendered = prompts(form, field, [QUESTION, sent, QUESTION])
    assert rendered == prompts(form, field, [QUESTION, plain, QUESTION])
    if client.startswith("reasoning"):
        assert rendered == prompts(form, field, [QUESTION, QUESTION])


@pytest.mark.parametrize(
    ("form", "field", "calls"),
    [
        (ChatRequest, "messages", {"role": "assistant", "tool_calls": [CALL] * 100}),
        (
            MessagesRequest,
            "messages",
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}] * 100,
            },
        ),
    ],
)
def test_a_conversation_of_too_many_calls_is_refused(
    form: type[Body], field: str, calls: dict[str, Any]
) -> None:
    assert prompts(form, field, [QUESTION, *[calls] * 5])
    with pytest.raises(ApiError, match="2121 messages and calls; a conversation has at most 2048"):
        prompts(form, field, [QUESTION, *[calls] * 20, *[QUESTION] * 100])


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_long_text_is_not_copied_for_each_short_one_behind_it(name: str) -> None:
    form, field, long, short = CONVERSATIONS[name]

    def seconds(turns: list[dict[str, Any]]) -> float:
        began_s = time.thread_time()
        assert prompts(form, field, turns)
        return time.thread_time() - began_s

    both = min(seconds(long + short) for _ in range(3))
    assert both < 5 * min(seconds(long) + seconds([QUESTION, *short]) for _ in range(3))
