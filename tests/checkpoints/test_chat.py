"""A real chat model behind the latest phase's server, for the openai client."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from benchmarks.servers import Setup, open_server, phase_target
from common.startup.phases import phase_names
from tests.checkpoints.conftest import RealModel

pytestmark = [pytest.mark.checkpoints, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def client(chat_model: RealModel) -> Iterator[openai.OpenAI]:
    setup = Setup(model=chat_model.name, slots=2, max_seq_len=2048)
    with open_server(phase_target(phase_names()[-1], setup)) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def test_an_answer_ends_by_itself_where_it_is_complete(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    answer = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=100
    ).choices[0]
    assert answer.finish_reason == "stop"
    assert "4" in answer.message.content
    assert "<|im_end|>" not in answer.message.content
    stream = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=100, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == answer.message.content
    assert len(pieces) > 5


def test_more_of_a_chat_is_found_in_the_cache_with_every_turn(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "You answer in one short sentence."}]
    found = []
    for thing in ("a cat", "a river", "a book", "the moon", "bread", "a bicycle", "rain", "music"):
        messages.append({"role": "user", "content": f"What is {thing}?"})
        reply = client.chat.completions.create(
            model="smollm2", messages=messages, temperature=0, max_tokens=40
        )
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        found.append(reply.usage.prompt_tokens_details.cached_tokens)
        assert found[-1] < reply.usage.prompt_tokens
    assert all(after > before for before, after in itertools.pairwise(found)), found


def test_an_answer_follows_a_schema_and_is_true(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string"}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    reply = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France? Answer in JSON."}],
        temperature=0,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    assert json.loads(reply.choices[0].message.content) == {"capital": "Paris"}


def function(name: str, description: str, **properties: dict[str, str]) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def test_a_chat_calls_the_right_tool_and_reads_its_result(client: openai.OpenAI) -> None:
    """The example of the page on tools."""
    weather = function("get_weather", "Get the current weather in a city.", city={"type": "string"})
    add = function("add", "Add two numbers.", a={"type": "number"}, b={"type": "number"})
    asked: Any = {"model": "smollm2", "temperature": 0, "max_tokens": 100}
    for question, name, arguments in (
        ("How much is 12 plus 30?", "add", {"a": 12, "b": 30}),
        ("What is the weather in Rome?", "get_weather", {"city": "Rome"}),
    ):
        messages: list[Any] = [{"role": "user", "content": question}]
        first = client.chat.completions.create(
            **asked,
            messages=messages,
            tools=[weather, add],
            tool_choice="required",
            parallel_tool_calls=False,
        ).choices[0]
        assert first.finish_reason == "tool_calls"
        (call,) = first.message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 24 degrees Celsius."}
    second = client.chat.completions.create(
        **asked, messages=[*messages, first.message, result], tools=[weather]
    )
    assert second.choices[0].finish_reason == "stop"
    assert "24" in str(second.choices[0].message.content)
