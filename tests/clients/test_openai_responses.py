"""The `openai` library for Python: responses, whole, streamed and parsed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel, ConfigDict

from tests.clients.support import MAX_TOKENS, Library, assert_same, chatted, on_phases
from tests.server.support import MESSAGES, PREFIXES, ServerProcess

TOOL = Library("openai")
pytestmark = on_phases(5, 8, 9, 10)
USAGE = ("input_tokens", "output_tokens", "total_tokens")


class Fox(BaseModel):
    """Whether a fox is brave, and where it lives."""

    model_config = ConfigDict(extra="forbid")

    brave: bool
    home: Literal["forest", "river"]


@pytest.fixture(params=PREFIXES)
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def options(server: ServerProcess, prefix: str) -> dict[str, Any]:
    key = server.client.headers["Authorization"].removeprefix("Bearer ")
    return {"base_url": server.url + prefix, "api_key": key, "max_retries": 0}


@pytest.fixture
def client(options: dict[str, Any], server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**options) as client:
        yield client
    server.assert_serves()


@pytest.fixture
def asked(server: ServerProcess) -> dict[str, Any]:
    """Arguments that every call has."""
    return {"model": server.model, "input": MESSAGES, "temperature": 0}


def told(response: Any) -> dict[str, Any]:
    return {"text": response.output_text, "usage": [getattr(response.usage, name) for name in USAGE]}


def test_json_and_stream(client: openai.OpenAI, asked: dict[str, Any], server: ServerProcess) -> None:
    """`responses.create`, whole and streamed, under both prefixes."""
    expected = chatted(server)
    asked |= {"max_output_tokens": MAX_TOKENS}
    whole = client.responses.create(**asked)
    assert_same(told(whole), expected)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    events = list(client.responses.create(**asked, stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert_same(told(last.response) | {"pieces": pieces}, expected)


def test_instructions_and_a_text(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    """`instructions` and an `input` of text, under both prefixes."""
    system, user = (message["content"] for message in MESSAGES)
    plain = client.responses.create(**asked, max_output_tokens=MAX_TOKENS)
    asked |= {"instructions": system, "input": user}
    assert client.responses.create(**asked, max_output_tokens=MAX_TOKENS).output_text == plain.output_text


def test_the_stream_helper(client: openai.OpenAI, asked: dict[str, Any], server: ServerProcess) -> None:
    """`responses.stream`, and its final response, under both prefixes."""
    with client.responses.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert_same(told(final) | {"pieces": pieces}, chatted(server, max_tokens=900))
    assert final.status == "completed"


def test_parsing(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    """`responses.parse` and `responses.stream` with a pydantic class, under both prefixes."""
    parsed = client.responses.parse(**asked, text_format=Fox)
    assert isinstance(parsed.output_parsed, Fox)
    assert json.loads(parsed.output_text) == parsed.output_parsed.model_dump()
    with client.responses.stream(**asked, text_format=Fox) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_a_function_of_a_pydantic_class(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    """`responses.parse` and `responses.stream` with a function of a pydantic class, under both prefixes."""
    asked |= {"tools": [openai.pydantic_function_tool(Fox)], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False}
    (call,) = client.responses.parse(**asked).output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Fox)
    with client.responses.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert "".join(pieces) == call.arguments
    assert streamed.parsed_arguments == call.parsed_arguments  # type: ignore[union-attr]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It is."}
    asked |= {"input": [*MESSAGES, call, output], "tool_choice": "auto"}
    assert client.responses.parse(**asked).output_text


def test_a_function_of_a_namespace(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    """The tools of an MCP server as Codex sends them, beside a tool that only OpenAI runs."""
    files: Any = {
        "type": "namespace",
        "name": "mcp__files__",
        "description": "Reads files.",
        "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
    }
    tools: list[Any] = [{"type": "web_search"}, files]
    response = client.responses.create(
        **asked, tools=tools, tool_choice="required", parallel_tool_calls=False, max_output_tokens=60
    )
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.namespace, call.name, call.arguments) == ("mcp__files__", "read", "{}")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "A fox."}
    conversation: list[Any] = [*MESSAGES, *response.output, result]
    assert client.responses.create(
        **asked | {"input": conversation}, tools=tools, max_output_tokens=4
    ).output_text


def test_an_answer_can_be_sent_back(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    """A conversation whose items go along with the next question, as objects and as dicts, under both prefixes."""
    items: list[Any] = list(MESSAGES)
    for question in ("And then?", "Who was it?"):
        answer = client.responses.create(**asked | {"input": items}, max_output_tokens=MAX_TOKENS)
        items += [*answer.output, {"role": "user", "content": question}]
    dumped = [item.model_dump() if isinstance(item, BaseModel) else item for item in items]
    answers = [
        client.responses.create(**asked | {"input": each}, max_output_tokens=MAX_TOKENS).output_text
        for each in (items, dumped)
    ]
    assert answers[0] == answers[1]


def test_asynchronous(options: dict[str, Any], asked: dict[str, Any], server: ServerProcess) -> None:
    """`AsyncOpenAI`, nine requests side by side, one of them refused, under both prefixes."""
    asked |= {"max_output_tokens": MAX_TOKENS}

    async def streamed(client: openai.AsyncOpenAI) -> str:
        stream = await client.responses.create(**asked, stream=True)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def whole(client: openai.AsyncOpenAI) -> str:
        return str((await client.responses.create(**asked)).output_text)

    async def refused(client: openai.AsyncOpenAI) -> str:
        with pytest.raises(openai.APIStatusError) as refusal:
            await client.responses.create(**asked, top_p=2)
        return str(refusal.value.param)

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(**options) as client:
            return await asyncio.gather(*(ask(client) for ask in (refused, *(whole, streamed) * 4)))

    assert asyncio.run(run()) == ["top_p", *[chatted(server)["text"]] * 8]


# ---------------------------------------------------------------------- refusals


def test_refusals(client: openai.OpenAI, asked: dict[str, Any], prefix: str) -> None:
    """Refusals as the library's exceptions, and the next request, under both prefixes."""
    refusal = openai.UnprocessableEntityError if prefix == "/v1" else openai.BadRequestError
    for fields in (
        {"max_output_tokens": 0},
        {"temperature": -1},
        {"background": True},
        {"top_p": 2, "stream": True},
    ):
        with pytest.raises(refusal) as refused:
            client.responses.create(**asked | fields)
        assert str(refused.value.param).partition("[")[0] == next(iter(fields))
    for missing in ({"previous_response_id": "resp_1"}, {"model": "another"}):
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**asked | missing)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.AuthenticationError, match="key"):
        client.with_options(api_key="wrong").responses.create(**asked)


def test_a_stream_left_early(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    """A stream that is left after its first piece, and the next request, under both prefixes."""
    asked |= {"extra_body": {"ignore_eos": True}}
    with client.responses.create(**asked, stream=True) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
