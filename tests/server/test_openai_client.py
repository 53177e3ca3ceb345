"""The real `openai` client, as its users use it: completions and chat, whole and streamed, under both prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.support import MESSAGES, PREFIXES, ServerProcess, rendered

PROMPT = "Once upon a time"


@dataclass
class Api:
    """Completions or chat, of a client that may be asynchronous."""

    client: openai.OpenAI | openai.AsyncOpenAI
    model: str
    chats: bool

    def create(self, **fields: Any) -> Any:
        asked: dict[str, Any] = {"messages": MESSAGES} if self.chats else {"prompt": PROMPT}
        resource: Any = self.client.chat.completions if self.chats else self.client.completions
        return resource.create(**{"model": self.model, "temperature": 0, "max_tokens": 12} | asked | fields)


def text_of(choice: Any) -> str:
    """The text of a choice, or of its part in a chunk."""
    if hasattr(choice, "text"):
        return str(choice.text)
    return (choice.message if hasattr(choice, "message") else choice.delta).content or ""


@pytest.fixture(params=PREFIXES)
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["completions", "chat"])
def chats(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def client(server: ServerProcess, prefix: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + prefix, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def api(client: openai.OpenAI, server: ServerProcess, chats: bool) -> Api:
    return Api(client, server.model, chats)


@pytest.fixture
def expected(server: ServerProcess, chats: bool) -> str:
    """The text of twelve tokens."""
    return server.text(prompt=rendered(MESSAGES) if chats else PROMPT, max_tokens=12)


# ---------------------------------------------------------------------- answers


def test_json_and_stream_agree(api: Api, expected: str) -> None:
    whole = api.create()
    *chunks, last = api.create(stream=True, stream_options={"include_usage": True})
    assert text_of(whole.choices[0]) == expected
    assert "".join(text_of(chunk.choices[0]) for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert (last.choices, last.usage) == ([], whole.usage)
    assert whole.usage.completion_tokens == 12


def test_async_clients_side_by_side(server: ServerProcess, prefix: str, chats: bool, expected: str) -> None:
    async def streamed(api: Api) -> str:
        return "".join([text_of(chunk.choices[0]) async for chunk in await api.create(stream=True)])

    async def whole(api: Api) -> str:
        return text_of((await api.create()).choices[0])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + prefix, api_key="none", max_retries=0) as client:
            api = Api(client, server.model, chats)
            return await asyncio.gather(*(ask(api) for ask in (whole, streamed) * 4))

    assert asyncio.run(run()) == [expected] * 8


def test_choices_of_one_seed_differ(api: Api) -> None:
    choices = api.create(n=4, seed=4, temperature=1.5, max_tokens=40).choices
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    assert len({text_of(choice) for choice in choices}) == 4


@pytest.mark.parametrize("chats", [False], indirect=True)
def test_equal_prompts_agree(api: Api) -> None:
    first, second = api.create(prompt=[PROMPT, PROMPT]).choices
    assert first.text == second.text


@pytest.mark.parametrize("chats", [False], indirect=True)
def test_fields_of_openai_and_of_others(api: Api) -> None:
    fields = {"n": 2, "best_of": 2, "stop": ["\u2603"], "seed": 4, "top_p": 0.9, "user": "someone"}
    fields |= {"logprobs": 2, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    more = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2}
    answer = api.create(**fields, extra_body=more)
    assert len(answer.choices) == 2
    assert answer.choices[1].logprobs.tokens


def test_the_end_of_a_stop_string(api: Api) -> None:
    whole = text_of(api.create(max_tokens=30).choices[0])
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    (choice,) = api.create(max_tokens=30, stop=[stop]).choices
    assert (text_of(choice), choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_models(client: openai.OpenAI, server: ServerProcess) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


# ---------------------------------------------------------------------- chat alone


@pytest.mark.parametrize("count", [None, 0, 5])
@pytest.mark.parametrize("chats", [True], indirect=True)
def test_logprobs_of_chat(api: Api, count: int | None) -> None:
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
    messages = list(MESSAGES)
    for question in ("And then?", "Who was it?"):
        answer = client.chat.completions.create(model=server.model, messages=messages, max_tokens=12)
        messages += [answer.choices[0].message, {"role": "user", "content": question}]
    messages[2] = messages[2].model_dump()  # with its nulls
    assert client.chat.completions.create(model=server.model, messages=messages, max_tokens=2).choices


class Fox(BaseModel):
    brave: bool


def test_the_clients_helpers(client: openai.OpenAI, server: ServerProcess) -> None:
    fields: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "temperature": 0}
    with client.chat.completions.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    parsed = client.chat.completions.parse(**fields, response_format=Fox).choices[0].message.parsed
    assert isinstance(parsed, Fox)


def test_structured_outputs(api: Api) -> None:
    answer = api.create(extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert text_of(answer.choices[0]) in ("yes", "no")


# ---------------------------------------------------------------------- refusals and failures


def test_refusals_are_exceptions(api: Api, prefix: str) -> None:
    refusal = openai.UnprocessableEntityError if prefix == "/v1" else openai.BadRequestError
    for fields in ({"max_tokens": 100_000}, {"temperature": -1}):
        with pytest.raises(refusal, match=next(iter(fields))):
            api.create(**fields)
    with pytest.raises(openai.NotFoundError) as unknown:
        api.create(model="another")
    assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize("order", ["fail", "nan"])
def test_a_failed_request_is_not_sent_again(gated: ServerProcess, order: str) -> None:
    """The library sends a request up to three times, unless the server's answer says that it is no use."""
    gated.order(order)
    with (
        openai.OpenAI(base_url=f"{gated.url}/v1", api_key="none") as client,
        pytest.raises(openai.InternalServerError) as failed,
    ):
        client.completions.create(model=gated.model, prompt="A failure of", max_tokens=2)
    assert failed.value.response.headers["x-should-retry"] == "false"
    assert gated.counters()["requests_added"] == 1


def test_a_failure_in_a_stream_is_an_exception(gated: ServerProcess, prefix: str, chats: bool) -> None:
    with openai.OpenAI(base_url=gated.url + prefix, api_key="none", max_retries=0) as client:
        stream = Api(client, gated.model, chats).create(
            max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        gated.order("fail")
        with pytest.raises(openai.APIError, match="the server failed"):
            list(stream)
