"""The `openai` library for Python: completions, chat and responses, whole, streamed and parsed.

It is installed with the project's own packages, and so runs in the ordinary suite, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from common.startup.phases import phase_names, phase_number
from tests.clients.support import MAX_TOKENS, PROMPT, Library, assert_same, completed, on_phases
from tests.support.servers import MESSAGES, PREFIXES, ServerProcess, rendered

TOOL = Library("openai")
pytestmark = on_phases(*map(phase_number, phase_names()))

#: For each API, what is asked, and the name of the field for the most new tokens.
APIS: dict[str, tuple[dict[str, Any], str]] = {
    "completions": ({"prompt": PROMPT}, "max_tokens"),
    "chat": ({"messages": MESSAGES}, "max_tokens"),
    "responses": ({"input": MESSAGES}, "max_output_tokens"),
}
on_apis = pytest.mark.parametrize("name", APIS)
on_text_and_chat = pytest.mark.parametrize("name", ["completions", "chat"])


@dataclass
class Api:
    """One of the APIs of a client, which may be asynchronous."""

    client: openai.OpenAI | openai.AsyncOpenAI
    model: str
    name: str

    def create(self, **fields: Any) -> Any:
        """Ask, greedily unless `fields` say so. `max_tokens` has the name that the API has for it."""
        asked, most = APIS[self.name]
        resource: Any = (
            self.client.chat.completions if self.name == "chat" else getattr(self.client, self.name)
        )
        fields[most] = fields.pop("max_tokens", MAX_TOKENS)
        return resource.create(**{"model": self.model, "temperature": 0} | asked | fields)


def text_of(answer: Any) -> str:
    if hasattr(answer, "output_text"):
        return str(answer.output_text)
    (choice,) = answer.choices
    return str(choice.text if hasattr(choice, "text") else choice.message.content)


def usage_of(answer: Any) -> list[int]:
    usage = answer.usage
    if hasattr(usage, "prompt_tokens"):
        return [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]
    return [usage.input_tokens, usage.output_tokens, usage.total_tokens]


def pieces_of(stream: Iterable[Any]) -> list[str]:
    return list(filter(None, map(piece_of, stream)))


def piece_of(event: Any) -> str:
    """Return the text that an event or a chunk adds to the answer."""
    if hasattr(event, "choices"):
        choice = event.choices[0] if event.choices else None
        return (choice.text if hasattr(choice, "text") else choice.delta.content or "") if choice else ""
    return str(event.delta) if event.type in ("response.output_text.delta", "content.delta") else ""


#: The routes of both prefixes are the same functions, so the ordinary suite asks both only where they differ.
OTHER_PREFIX = pytest.param(PREFIXES[1], marks=pytest.mark.clients)
on_both_prefixes = pytest.mark.parametrize("prefix", PREFIXES, indirect=True)


@pytest.fixture(params=[PREFIXES[0], OTHER_PREFIX])
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def options(server: ServerProcess, prefix: str) -> dict[str, Any]:
    key = server.client.headers.get("Authorization", "Bearer none").removeprefix("Bearer ")
    return {"base_url": server.url + prefix, "api_key": key, "max_retries": 0}


@pytest.fixture
def client(options: dict[str, Any], server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**options) as client:
        yield client
    server.assert_serves()


@pytest.fixture
def api(client: openai.OpenAI, server: ServerProcess, name: str) -> Api:
    return Api(client, server.model, name)


@pytest.fixture
def prompt(name: str) -> Any:
    """A prompt for which the native route gives the same answer."""
    return PROMPT if name == "completions" else rendered(MESSAGES)


# ---------------------------------------------------------------------- answers


@on_apis
@on_both_prefixes
def test_json_and_stream(api: Api, server: ServerProcess, prompt: Any) -> None:
    """Completions, chat and responses, whole and streamed with usage, under both prefixes."""
    expected = completed(server, prompt=prompt)
    whole = api.create()
    assert_same({"text": text_of(whole), "usage": usage_of(whole)}, expected)
    more = {} if api.name == "responses" else {"stream_options": {"include_usage": True}}
    events = list(api.create(stream=True, **more))
    pieces = pieces_of(events)
    last = events[-1].response if api.name == "responses" else events[-1]
    assert_same({"text": "".join(pieces), "pieces": pieces, "usage": usage_of(last)}, expected)
    if api.name == "responses":
        assert text_of(last) == text_of(whole)
        assert events[-1].type == "response.incomplete"
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    else:
        assert last.choices == []
        assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


@on_apis
def test_asynchronous(
    options: dict[str, Any], server: ServerProcess, prefix: str, name: str, prompt: Any
) -> None:
    """`AsyncOpenAI`, nine requests side by side, one of them refused, under both prefixes."""

    async def streamed(api: Api) -> str:
        return "".join([piece_of(event) async for event in await api.create(stream=True)])

    async def whole(api: Api) -> str:
        return text_of(await api.create())

    async def refused(api: Api) -> int:
        with pytest.raises(openai.APIStatusError) as refusal:
            await api.create(top_p=2)
        assert refusal.value.param == "top_p"
        return refusal.value.status_code

    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(**options) as client:
            api = Api(client, server.model, name)
            return await asyncio.gather(*(ask(api) for ask in (refused, *(whole, streamed) * 4)))

    status = 422 if prefix == "/v1" else 400
    assert asyncio.run(run()) == [status, *[completed(server, prompt=prompt)["text"]] * 8]


@on_text_and_chat
def test_choices(api: Api, server: ServerProcess, prompt: Any) -> None:
    """`n` of 4 with a seed, completions and chat, under both prefixes."""
    sampled = {"n": 4, "seed": 4, "temperature": 1.5, "max_tokens": 40}
    answer = api.create(**sampled)
    native = server.complete(prompt=prompt, **sampled)
    texts = [each.text if api.name == "completions" else each.message.content for each in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts == [choice["text"] for choice in native["choices"]]
    assert len(set(texts)) == 4
    assert answer.usage.completion_tokens == native["usage"]["completion_tokens"]


@on_text_and_chat
def test_logprobs(api: Api, server: ServerProcess, prompt: Any) -> None:
    """`logprobs` of completions and of chat, under both prefixes."""
    answer = server.complete(prompt=prompt, max_tokens=MAX_TOKENS, logprobs=2)
    native = answer["choices"][0]["logprobs"]
    if api.name == "chat":
        content = api.create(logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert [each.token for each in content] == native["tokens"]
        assert [each.logprob for each in content] == native["token_logprobs"]
    else:
        assert api.create(logprobs=2).choices[0].logprobs.model_dump() == native


@pytest.mark.parametrize("count", [None, 0, 5])
@pytest.mark.parametrize("name", ["chat"])
def test_logprobs_of_chat(api: Api, count: int | None) -> None:
    """`top_logprobs` of chat, whole and streamed, under both prefixes."""
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": count, "seed": 2, "temperature": 1}
    fields |= {"extra_body": {"ignore_eos": True}}
    choice = api.create(**fields).choices[0]
    content = choice.logprobs.content
    assert "".join(each.token for each in content) == choice.message.content
    for each in content:
        assert each.logprob <= 0
        assert each.bytes == list(each.token.encode())
        top = [likely.logprob for likely in each.top_logprobs]
        assert (top, len(top)) == (sorted(top, reverse=True), count or 0)
    streamed = [chunk.choices[0].logprobs for chunk in api.create(**fields, stream=True)]
    parts = [part.content[0] for part in streamed if part is not None and part.content]
    assert [(part.token, part.logprob) for part in parts] == [(each.token, each.logprob) for each in content]


@pytest.mark.parametrize("name", ["chat", "responses"])
def test_an_answer_can_be_sent_back(api: Api) -> None:
    """Conversations whose answers go along with the next question, as objects and as dicts, under both prefixes."""
    (field,) = APIS[api.name][0]
    turns: list[Any] = list(MESSAGES)
    for question in ("And then?", "Who was it?"):
        answer = api.create(**{field: turns})
        said = answer.output if api.name == "responses" else [answer.choices[0].message]
        turns += [*said, {"role": "user", "content": question}]
    dumped = [
        turn.model_dump() if isinstance(turn, BaseModel) else turn for turn in turns
    ]  # with null fields
    assert text_of(api.create(**{field: turns})) == text_of(api.create(**{field: dumped}))


# ---------------------------------------------------------------------- pydantic classes and tools


class Fox(BaseModel):
    """Whether a fox is brave, and where it lives."""

    model_config = ConfigDict(extra="forbid")

    brave: bool
    home: Literal["forest", "river"]


@pytest.fixture
def asked(server: ServerProcess, name: str) -> dict[str, Any]:
    """Arguments of the library's helpers."""
    return {"model": server.model, "temperature": 0} | APIS[name][0]


@pytest.mark.parametrize("name", ["chat"])
def test_helpers_of_chat(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    """`chat.completions.stream`, and `parse` with a pydantic class, under both prefixes."""
    with client.chat.completions.stream(**asked) as stream:
        pieces = pieces_of(event for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert "".join(pieces) == text_of(final)
    assert final.choices[0].finish_reason == "stop"
    parsed = client.chat.completions.parse(**asked, response_format=Fox).choices[0].message
    assert isinstance(parsed.parsed, Fox)
    schema = {"name": "fox", "schema": Fox.model_json_schema(), "strict": True}
    form: Any = {"type": "json_schema", "json_schema": schema}
    assert text_of(client.chat.completions.create(**asked, response_format=form)) == parsed.content
    assert json.loads(parsed.content or "") == parsed.parsed.model_dump()
    back = asked | {"messages": [*MESSAGES, parsed, *MESSAGES], "max_tokens": 2}
    assert text_of(client.chat.completions.create(**back))


@pytest.mark.parametrize("name", ["responses"])
def test_helpers_of_responses(client: openai.OpenAI, asked: dict[str, Any], server: ServerProcess) -> None:
    """`responses.stream`, and `parse` with a pydantic class, under both prefixes."""
    with client.responses.stream(**asked) as stream:
        pieces = pieces_of(stream)
        final = stream.get_final_response()
    expected = completed(server, prompt=rendered(MESSAGES), max_tokens=900)
    assert_same({"text": text_of(final), "pieces": pieces, "usage": usage_of(final)}, expected)
    assert final.status == "completed"
    parsed = client.responses.parse(**asked, text_format=Fox)
    assert isinstance(parsed.output_parsed, Fox)
    assert json.loads(parsed.output_text) == parsed.output_parsed.model_dump()
    with client.responses.stream(**asked, text_format=Fox) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "Fox"}}, "auto", "none"]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named", "auto", "none"])
@pytest.mark.parametrize("name", ["chat"])
def test_tools(client: openai.OpenAI, asked: dict[str, Any], choice: Any) -> None:
    """`create`, `parse` and `stream` of chat with a pydantic class as a tool, each `tool_choice`, both prefixes."""
    fields: dict[str, Any] = asked | {
        "max_tokens": 100,
        "stop": ["."],
        "tools": [openai.pydantic_function_tool(Fox)],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    answer = client.chat.completions.create(**fields).choices[0]
    parsed = client.chat.completions.parse(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert answer.finish_reason == parsed.finish_reason == final.finish_reason
    assert answer.message.content == parsed.message.content == final.message.content
    if choice in ("auto", "none"):
        assert answer.message.content
        assert (answer.message.tool_calls, parsed.message.tool_calls, done) == (None, None, [])
        return
    (call,) = answer.message.tool_calls or ()
    (same,) = parsed.message.tool_calls or ()
    (event,) = done
    assert call.type == "function"
    assert call.function.arguments == same.function.arguments == event.arguments
    assert isinstance(same.function.parsed_arguments, Fox)
    assert same.function.parsed_arguments == event.parsed_arguments
    assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is brave."}
    messages = [*MESSAGES, parsed.message, result]  # with `parsed_arguments`
    told = client.chat.completions.create(**fields | {"messages": messages, "tool_choice": "auto"})
    assert text_of(told)


@pytest.mark.parametrize("name", ["chat"])
def test_a_class_or_a_tool(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    """`parse` with a pydantic class and a tool: the answer is the one or the other, under both prefixes."""

    class Search(BaseModel):
        model_config = ConfigDict(extra="forbid")

        place: Literal["forest", "river"]

    more: dict[str, Any] = {"tools": [openai.pydantic_function_tool(Search)], "parallel_tool_calls": False}
    for seed in range(3):
        fields = asked | more | {"temperature": 1, "seed": seed, "max_tokens": 80}
        (choice,) = client.chat.completions.parse(**fields, response_format=Fox).choices
        if choice.message.tool_calls:
            assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Search)
        else:
            assert isinstance(choice.message.parsed, Fox)


@pytest.mark.parametrize("name", ["responses"])
def test_a_function_of_a_response(client: openai.OpenAI, asked: dict[str, Any]) -> None:
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


# ---------------------------------------------------------------------- refusals


@on_apis
@on_both_prefixes
def test_refusals(api: Api, prefix: str) -> None:
    """Refusals as the library's exceptions, and the next request, under both prefixes."""
    refusal = openai.UnprocessableEntityError if prefix == "/v1" else openai.BadRequestError
    wrong: list[dict[str, Any]] = [{"temperature": -1}, {"top_p": 2}, {"top_p": 2, "stream": True}]
    wrong += [{"background": True}] if api.name == "responses" else [{"n": 0}]
    for fields in wrong:
        with pytest.raises(refusal) as refused:
            api.create(**fields)
        assert refused.value.param == next(iter(fields))
    with pytest.raises(openai.NotFoundError) as unknown:
        api.create(model="another")
    assert unknown.value.code == "model_not_found"
