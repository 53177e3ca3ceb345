"""How conversations are rendered: what clients send back, and that the time follows from their length."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from common.models.registry import open_checkpoint
from common.server.api.bodies import Body, Limits, parse
from common.server.api.chat import ChatRequest
from common.server.api.messages import MessagesRequest
from common.server.api.responses import ResponsesRequest
from common.text.dialect import Dialect

QUESTION = {"role": "user", "content": "hi"}
CALL = {"id": "a", "function": {"name": "f", "arguments": "{}"}}


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
