"""The real `openai` client, as its users use it: synchronous and not, streaming and not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.server.support import ServerProcess


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


PROMPT = "Once upon a time"


def test_json(client: openai.OpenAI, server: ServerProcess) -> None:
    answer = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=10, temperature=0)
    assert answer.choices[0].text == server.complete(max_tokens=10)["choices"][0]["text"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.choices[0].finish_reason == "length"


def test_stream_is_read_to_its_end(client: openai.OpenAI, server: ServerProcess) -> None:
    chunks = list(
        client.completions.create(
            model=server.model, prompt=PROMPT, max_tokens=10, temperature=0, stream=True
        )
    )
    assert len(chunks) == 11
    assert (
        "".join(chunk.choices[0].text for chunk in chunks)
        == server.complete(max_tokens=10)["choices"][0]["text"]
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 10 + ["length"]
    assert all(chunk.object == "text_completion" for chunk in chunks)


def test_include_usage_is_openais(client: openai.OpenAI, server: ServerProcess) -> None:
    *chunks, last = client.completions.create(
        model=server.model,
        prompt=[PROMPT, "The"],
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 6
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1}


def test_choices_logprobs_and_everything_else(client: openai.OpenAI, server: ServerProcess) -> None:
    answer = client.completions.create(
        model=server.model,
        prompt=PROMPT,
        n=2,
        best_of=2,
        logprobs=2,
        stop=["\u2603"],
        seed=4,
        top_p=0.9,
        user="someone",
        presence_penalty=0.1,
        frequency_penalty=0.1,
        max_tokens=5,
        extra_body={"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2},
    )
    assert len(answer.choices) == 2
    assert answer.choices[1].logprobs is not None
    assert answer.choices[1].logprobs.tokens


def test_refusals_are_exceptions(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=server.model, prompt="")
    assert bad.value.param == "prompt"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="another", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.UnprocessableEntityError, match="suffix"):
        client.completions.create(model=server.model, prompt=PROMPT, suffix="x")


def test_models(client: openai.OpenAI, server: ServerProcess) -> None:
    assert [model.id for model in client.models.list()] == [server.model]


def test_async_clients_side_by_side(server: ServerProcess) -> None:
    expected = server.complete(max_tokens=12)["choices"][0]["text"]

    async def whole(client: openai.AsyncOpenAI) -> str:
        answer = await client.completions.create(
            model=server.model, prompt=PROMPT, max_tokens=12, temperature=0
        )
        return answer.choices[0].text

    async def streamed(client: openai.AsyncOpenAI) -> str:
        stream = await client.completions.create(
            model=server.model, prompt=PROMPT, max_tokens=12, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client) for ask in (whole, streamed) * 4))

    assert asyncio.run(run()) == [expected] * 8


@pytest.mark.parametrize("order", ["fail", "nan"])
def test_a_failed_request_is_not_sent_again(gated: ServerProcess, order: str) -> None:
    """The library sends a request up to three times if a server fails, unless the server says that it is no use."""
    gated.order(order)
    with openai.OpenAI(base_url=f"{gated.url}/v1", api_key="none") as client:
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(model=gated.model, prompt="A failure of", max_tokens=2)
        assert failed.value.response.headers["x-should-retry"] == "false"
        assert gated.counters()["requests_added"] == 1
        gated.order("heal")
        assert client.completions.create(model=gated.model, prompt="A failure of", max_tokens=2).choices


def test_a_failure_in_a_stream_is_an_exception(gated: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{gated.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model=gated.model,
            prompt=PROMPT,
            max_tokens=2000,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        gated.order("fail")
        with pytest.raises(openai.APIError, match="the server failed"):
            list(stream)
        gated.order("heal")
        assert client.completions.create(model=gated.model, prompt=PROMPT, max_tokens=2).choices[0].text
