"""Rendering hostile conversations takes time in proportion to their length."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from common.dialect import Dialect
from common.models.registry import open_checkpoint
from common.server.bodies import Body, Limits, parse
from common.server.requests.chat import ChatRequest
from common.server.requests.responses import ResponsesRequest

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


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_long_text_is_not_copied_for_each_short_one_behind_it(name: str) -> None:
    form, field, long, short = CONVERSATIONS[name]
    dialect = Dialect.of(open_checkpoint("zoo:llama-tiny").tokenizer())
    limits = Limits(models=("m",), max_choices=64, vocab_size=1024)

    def seconds(turns: list[dict[str, Any]]) -> float:
        body = json.dumps({field: turns}).encode()
        began_s = time.thread_time()
        request: Any = parse(body, form, limits)
        assert request.prompts(dialect)
        return time.thread_time() - began_s

    both = min(seconds(long + short) for _ in range(3))
    assert both < 5 * min(seconds(long) + seconds([QUESTION, *short]) for _ in range(3))
