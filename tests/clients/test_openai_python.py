"""The `openai` library for Python: completions and chat, whole and streamed.

It is installed with the project's own packages, and so runs in the ordinary suite, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from common.startup.phases import phase_names, phase_number
from tests.clients.support import MAX_TOKENS, PROMPT, USAGE, Library, assert_same, completed, on_phases
from tests.server.support import MESSAGES, PREFIXES, ServerProcess, rendered

TOOL = Library("openai")
pytestmark = on_phases(*map(phase_number, phase_names()))


@dataclass
class Api:
    """The completions or the chat of a client, which may be asynchronous."""

    client: openai.OpenAI | openai.AsyncOpenAI
    model: str
    chats: bool

    def create(self, **fields: Any) -> Any:
        asked: dict[str, Any] = {"messages": MESSAGES} if self.chats else {"prompt": PROMPT}
        resource: Any = self.client.chat.completions if self.chats else self.client.completions
        defaults = {"model": self.model, "temperature": 0, "max_tokens": MAX_TOKENS}
        return resource.create(**defaults | asked | fields)


def text_of(choice: Any) -> str:
    """Return the text of a choice, or of a choice's part in a chunk."""
    if hasattr(choice, "text"):
        return str(choice.text)
    return (choice.message if hasattr(choice, "message") else choice.delta).content or ""


def usage_of(answer: Any) -> list[int]:
    return [getattr(answer.usage, name) for name in USAGE]


@pytest.fixture(params=PREFIXES)
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["completions", "chat"])
def chats(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


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
def api(client: openai.OpenAI, server: ServerProcess, chats: bool) -> Api:
    return Api(client, server.model, chats)


@pytest.fixture
def prompt(chats: bool) -> Any:
    """A prompt for which the native route gives the same answer."""
    return rendered(MESSAGES) if chats else PROMPT


# ---------------------------------------------------------------------- answers


def test_json_and_stream(api: Api, server: ServerProcess, prompt: Any) -> None:
    """Completions and chat, whole and streamed with usage, under both prefixes."""
    expected = completed(server, prompt=prompt)
    whole = api.create()
    *chunks, last = api.create(stream=True, stream_options={"include_usage": True})
    assert_same({"text": text_of(whole.choices[0]), "usage": usage_of(whole)}, expected)
    pieces = [piece for chunk in chunks if (piece := text_of(chunk.choices[0]))]
    assert_same({"text": "".join(pieces), "pieces": pieces, "usage": usage_of(last)}, expected)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert (last.choices, last.usage) == ([], whole.usage)


def test_asynchronous(
    options: dict[str, Any], server: ServerProcess, prefix: str, chats: bool, prompt: Any
) -> None:
    """`AsyncOpenAI`, nine requests side by side, one of them refused, under both prefixes."""

    async def streamed(api: Api) -> str:
        return "".join([text_of(chunk.choices[0]) async for chunk in await api.create(stream=True)])

    async def whole(api: Api) -> str:
        return text_of((await api.create()).choices[0])

    async def refused(api: Api) -> int:
        with pytest.raises(openai.APIStatusError) as refusal:
            await api.create(top_p=2)
        return refusal.value.status_code

    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(**options) as client:
            api = Api(client, server.model, chats)
            return await asyncio.gather(*(ask(api) for ask in (refused, *(whole, streamed) * 4)))

    status = 422 if prefix == "/v1" else 400
    assert asyncio.run(run()) == [status, *[completed(server, prompt=prompt)["text"]] * 8]


def test_choices(api: Api, server: ServerProcess, prompt: Any) -> None:
    """`n` of 4 with a seed, completions and chat, under both prefixes."""
    sampled = {"n": 4, "seed": 4, "temperature": 1.5, "max_tokens": 40}
    answer = api.create(**sampled)
    native = server.complete(prompt=prompt, **sampled)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert list(map(text_of, answer.choices)) == [choice["text"] for choice in native["choices"]]
    assert len(set(map(text_of, answer.choices))) == 4
    assert answer.usage.completion_tokens == native["usage"]["completion_tokens"]


@pytest.mark.parametrize("chats", [False], indirect=True)
def test_equal_prompts_agree(api: Api) -> None:
    """Two equal prompts in one request, under both prefixes."""
    first, second = api.create(prompt=[PROMPT, PROMPT]).choices
    assert first.text == second.text


@pytest.mark.parametrize("chats", [False], indirect=True)
def test_fields_of_openai_and_of_others(api: Api) -> None:
    """Fields of OpenAI and, by `extra_body`, of vLLM, under both prefixes."""
    fields = {"n": 2, "best_of": 2, "stop": ["\u2603"], "seed": 4, "top_p": 0.9, "user": "someone"}
    fields |= {"logprobs": 2, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    more = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2}
    answer = api.create(**fields, extra_body=more)
    assert len(answer.choices) == 2
    assert answer.choices[1].logprobs.tokens


def test_the_end_of_a_stop_string(api: Api) -> None:
    """`stop`, completions and chat, under both prefixes."""
    whole = text_of(api.create(max_tokens=30).choices[0])
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    (choice,) = api.create(max_tokens=30, stop=[stop]).choices
    assert (text_of(choice), choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_models(client: openai.OpenAI, server: ServerProcess) -> None:
    """The list of models, and one of them, under both prefixes."""
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_logprobs(api: Api, server: ServerProcess, prompt: Any) -> None:
    """`logprobs` of completions and of chat, under both prefixes."""
    answer = server.complete(prompt=prompt, max_tokens=MAX_TOKENS, logprobs=2)
    native = answer["choices"][0]["logprobs"]
    if api.chats:
        content = api.create(logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert [each.token for each in content] == native["tokens"]
        assert [each.logprob for each in content] == native["token_logprobs"]
    else:
        assert api.create(logprobs=2).choices[0].logprobs.model_dump() == native


@pytest.mark.parametrize("count", [None, 0, 5])
@pytest.mark.parametrize("chats", [True], indirect=True)
def test_logprobs_of_chat(api: Api, count: int | None) -> None:
    """`top_logprobs` of chat, whole and streamed, under both prefixes."""
    fields = {"logprobs": True, "top_logprobs": count, "seed": 2, "temperature": 1}
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


def test_an_answer_can_be_sent_back(client: openai.OpenAI, server: ServerProcess) -> None:
    """A conversation whose answers go along with the next question, under both prefixes."""
    messages = list(MESSAGES)
    for question in ("And then?", "Who was it?"):
        answer = client.chat.completions.create(model=server.model, messages=messages, max_tokens=12)
        messages += [answer.choices[0].message, {"role": "user", "content": question}]
    messages[2] = messages[2].model_dump()  # a dict with null fields
    assert client.chat.completions.create(model=server.model, messages=messages, max_tokens=2).choices


class Fox(BaseModel):
    model_config = ConfigDict(extra="forbid")

    brave: bool


def test_the_clients_helpers(client: openai.OpenAI, server: ServerProcess) -> None:
    """`chat.completions.stream`, and `parse` with a pydantic class, under both prefixes."""
    fields: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "temperature": 0}
    with client.chat.completions.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    parsed = client.chat.completions.parse(**fields, response_format=Fox).choices[0].message
    assert isinstance(parsed.parsed, Fox)
    schema = {"name": "fox", "schema": Fox.model_json_schema(), "strict": True}
    written = client.chat.completions.create(
        **fields, response_format={"type": "json_schema", "json_schema": schema}
    )
    assert written.choices[0].message.content == parsed.content
    assert json.loads(parsed.content) == parsed.parsed.model_dump()
    back = client.chat.completions.create(
        **fields | {"messages": [*MESSAGES, parsed, *MESSAGES]}, max_tokens=2
    )
    assert back.choices[0].message.content


CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "Fox"}}, "auto", "none"]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named", "auto", "none"])
def test_tools(client: openai.OpenAI, server: ServerProcess, choice: Any) -> None:
    """`create`, `parse` and `stream` of chat with a pydantic class as a tool, each `tool_choice`, both prefixes."""
    fields: dict[str, Any] = {
        "model": server.model,
        "messages": MESSAGES,
        "temperature": 0,
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
    assert told.choices[0].message.content


def test_a_class_or_a_tool(client: openai.OpenAI, server: ServerProcess) -> None:
    """`parse` with a pydantic class and a tool: the answer is the one or the other, under both prefixes."""

    class Search(BaseModel):
        model_config = ConfigDict(extra="forbid")

        place: Literal["forest", "river"]

    for seed in range(3):
        (choice,) = client.chat.completions.parse(
            model=server.model,
            messages=MESSAGES,
            seed=seed,
            max_tokens=80,
            tools=[openai.pydantic_function_tool(Search)],
            response_format=Fox,
            parallel_tool_calls=False,
        ).choices
        if choice.message.tool_calls:
            assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Search)
        else:
            assert isinstance(choice.message.parsed, Fox)


def test_structured_outputs(api: Api, server: ServerProcess, prompt: Any) -> None:
    """`structured_outputs` in `extra_body`, completions and chat, under both prefixes."""
    for form in ({"choice": ["red", "green"]}, {"regex": "[0-9]{4}"}):
        answer = api.create(extra_body={"structured_outputs": form})
        expected = completed(server, prompt=prompt, structured_outputs=form)["text"]
        assert text_of(answer.choices[0]) == expected
        assert expected in ("red", "green") or (expected.isdecimal() and len(expected) == 4)


# ---------------------------------------------------------------------- refusals


def test_refusals(api: Api, prefix: str) -> None:
    """Refusals as the library's exceptions, and the next request, under both prefixes."""
    refusal = openai.UnprocessableEntityError if prefix == "/v1" else openai.BadRequestError
    for fields in ({"n": 0}, {"temperature": -1}, {"top_p": 2}, {"top_p": 2, "stream": True}):
        with pytest.raises(refusal, match=next(iter(fields))):
            api.create(**fields)
    with pytest.raises(openai.NotFoundError) as unknown:
        api.create(model="another")
    assert unknown.value.code == "model_not_found"
    if not api.chats:
        with pytest.raises(openai.BadRequestError, match="prompt"):
            api.create(prompt="")


def test_a_wrong_key(api: Api) -> None:
    """A wrong key as the library's exception, and the next request, under both prefixes."""
    stranger = api.client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError, match="key"):
        Api(stranger, api.model, api.chats).create()


def test_a_stream_left_early(api: Api) -> None:
    """A stream that is left after its first piece, and the next request, under both prefixes."""
    with api.create(max_tokens=500, stream=True) as stream:
        next(iter(stream))
