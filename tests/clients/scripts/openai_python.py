"""The `openai` library: everything of it that the server serves."""

import asyncio
from typing import Any

import openai
from harness import GIVEN, caught, described, report, usage_of
from pydantic import BaseModel, ConfigDict

OPTIONS: dict[str, Any] = {"base_url": GIVEN["base_url"], "api_key": GIVEN["key"], "max_retries": 0}
MODEL: dict[str, Any] = {"model": GIVEN["model"]}
GREEDY: dict[str, Any] = MODEL | {"temperature": 0, "max_tokens": GIVEN["max_tokens"]}
TEXT: dict[str, Any] = GREEDY | {"prompt": GIVEN["prompt"]}
CHAT: dict[str, Any] = GREEDY | {"messages": GIVEN["messages"]}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}

client = openai.OpenAI(**OPTIONS)


class Fox(BaseModel):
    model_config = ConfigDict(extra="forbid")

    brave: bool


def joined(pieces: list[str], usage: Any) -> dict[str, Any]:
    return {"text": "".join(pieces), "pieces": pieces, "usage": usage_of(usage)}


def completion() -> Any:
    answer = client.completions.create(**TEXT)
    return {"text": answer.choices[0].text, "usage": usage_of(answer.usage)}


def completion_stream() -> Any:
    *chunks, last = client.completions.create(**TEXT, **STREAM)
    return joined([piece for chunk in chunks if (piece := chunk.choices[0].text)], last.usage)


def chat() -> Any:
    answer = client.chat.completions.create(**CHAT)
    return {"text": answer.choices[0].message.content, "usage": usage_of(answer.usage)}


def chat_stream() -> Any:
    *chunks, last = client.chat.completions.create(**CHAT, **STREAM)
    return joined([piece for chunk in chunks if (piece := chunk.choices[0].delta.content)], last.usage)


def stream_helper() -> Any:
    # The helper raises where an answer was cut off, so this one goes on to an end.
    complete = CHAT | {"max_tokens": 200, "stop": "."}
    with client.chat.completions.stream(**complete, stream_options={"include_usage": True}) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    said = joined(pieces, final.usage)
    assert final.choices[0].message.content == said["text"]
    return said


def completion_logprobs() -> Any:
    return client.completions.create(**TEXT, logprobs=2).choices[0].logprobs.model_dump()


def chat_logprobs() -> Any:
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    return [entry.model_dump() for entry in answer.choices[0].logprobs.content]


def choices() -> Any:
    sampled = {"temperature": 1, "seed": 3, "n": 3}
    text = client.completions.create(**TEXT | sampled)
    talk = client.chat.completions.create(**CHAT | sampled)
    return {
        "completions": [choice.text for choice in text.choices],
        "chat": [choice.message.content for choice in talk.choices],
        "generated": [text.usage.completion_tokens, talk.usage.completion_tokens],
    }


def structured() -> Any:
    free = {**CHAT, "max_tokens": 60}
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "fox", "schema": Fox.model_json_schema(), "strict": True},
    }
    one_of = {"structured_outputs": {"choice": ["red", "green"]}}
    return {
        "parsed": client.chat.completions.parse(**free, response_format=Fox)
        .choices[0]
        .message.parsed.model_dump(),
        "schema": client.chat.completions.create(**free, response_format=schema).choices[0].message.content,
        "choice": client.completions.create(**TEXT, extra_body=one_of).choices[0].text,
        "regex": client.completions.create(**TEXT, extra_body={"structured_outputs": {"regex": "[0-9]{4}"}})
        .choices[0]
        .text,
    }


def models() -> Any:
    return {
        "listed": [model.id for model in client.models.list()],
        "one": client.models.retrieve(GIVEN["model"]).id,
    }


def refusals() -> Any:
    return {
        "key": caught(lambda: client.with_options(api_key="wrong").completions.create(**TEXT)),
        "value": caught(lambda: client.completions.create(**TEXT | {"top_p": 2})),
        "model": caught(lambda: client.chat.completions.create(**CHAT | {"model": "another"})),
        "prompt": caught(lambda: client.completions.create(**TEXT | {"prompt": ""})),
        "in a stream": caught(
            lambda: list(client.chat.completions.create(**CHAT | {"top_p": 2}, stream=True))
        ),
        "next": completion(),
    }


def left_early() -> Any:
    """A stream that is closed after its first piece; then the next request."""
    with client.completions.create(**TEXT | {"max_tokens": 800}, stream=True) as stream:
        next(iter(stream))
    return completion()


def asynchronous() -> Any:
    async def whole(client: openai.AsyncOpenAI) -> str:
        return (await client.chat.completions.create(**CHAT)).choices[0].message.content

    async def streamed(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def text(client: openai.AsyncOpenAI) -> str:
        return (await client.completions.create(**TEXT)).choices[0].text

    async def refused(client: openai.AsyncOpenAI) -> dict[str, Any]:
        try:
            await client.completions.create(**TEXT | {"top_p": 2})
        except openai.APIStatusError as error:
            return described(error)
        raise AssertionError("it was answered")

    async def everything() -> dict[str, Any]:
        async with openai.AsyncOpenAI(**OPTIONS) as client:
            error, *said = await asyncio.gather(
                refused(client), *(ask(client) for ask in (whole, streamed, text) * 3)
            )
            return {"chat": said[0::3] + said[1::3], "text": said[2::3], "refused": error}

    return asyncio.run(everything())


report(
    completion,
    completion_stream,
    chat,
    chat_stream,
    stream_helper,
    completion_logprobs,
    chat_logprobs,
    choices,
    structured,
    models,
    refusals,
    left_early,
    asynchronous,
)
