"""`langchain-openai`: its chat model and its completion model."""

import asyncio
import functools
import operator
from typing import Any

from fox import Fox
from harness import GIVEN, caught, joined, report
from langchain_openai import ChatOpenAI, OpenAI

OPTIONS: dict[str, Any] = {
    "base_url": GIVEN["base_url"],
    "api_key": GIVEN["key"],
    "model": GIVEN["model"],
    "temperature": 0,
    "max_tokens": GIVEN["max_tokens"],
    "max_retries": 0,
}
MESSAGES = [(message["role"], message["content"]) for message in GIVEN["messages"]]
chat_model = ChatOpenAI(**OPTIONS, stream_usage=True)
text_model = OpenAI(**OPTIONS)


def usage_of(message: Any) -> list[int]:
    return [message.usage_metadata[name] for name in ("input_tokens", "output_tokens", "total_tokens")]


def added(chunks: list[Any]) -> Any:
    """Return the message that the chunks add up to."""
    return functools.reduce(operator.add, chunks)


def gathered(chunks: list[Any]) -> dict[str, Any]:
    whole = added(chunks)
    pieces = joined(chunk.content for chunk in chunks)
    return pieces | {"text": whole.content, "usage": usage_of(whole)}


def chat() -> Any:
    answer = chat_model.invoke(MESSAGES)
    return {"text": answer.content, "usage": usage_of(answer)}


def chat_stream() -> Any:
    return gathered(list(chat_model.stream(MESSAGES)))


def asynchronous() -> Any:
    async def streamed() -> dict[str, Any]:
        return gathered([chunk async for chunk in chat_model.astream(MESSAGES)])

    async def whole() -> dict[str, Any]:
        return {"text": (await chat_model.ainvoke(MESSAGES)).content}

    async def both() -> list[dict[str, Any]]:
        return list(await asyncio.gather(streamed(), whole(), streamed(), whole()))

    return asyncio.run(both())


def batch() -> Any:
    return [
        {"text": answer.content, "usage": usage_of(answer)} for answer in chat_model.batch([MESSAGES] * 3)
    ]


def text() -> Any:
    return {"text": text_model.invoke(GIVEN["prompt"])}


def text_stream() -> Any:
    return joined(text_model.stream(GIVEN["prompt"]))


def structured() -> Any:
    model = ChatOpenAI(**OPTIONS | {"max_tokens": GIVEN["call_tokens"]})
    return model.with_structured_output(Fox, method="json_schema").invoke(MESSAGES).model_dump()


def tools() -> Any:
    model = ChatOpenAI(**OPTIONS | {"max_tokens": GIVEN["call_tokens"]})
    bound = model.bind_tools([Fox], tool_choice="Fox")
    streamed = added(list(bound.stream(MESSAGES)))
    parsed = model.with_structured_output(Fox, method="function_calling").invoke(MESSAGES)
    (called,), (same,) = bound.invoke(MESSAGES).tool_calls, streamed.tool_calls
    assert called["args"] == same["args"] == parsed.model_dump()
    return called["args"]


def refusals() -> Any:
    return {
        "key": caught(lambda: ChatOpenAI(**OPTIONS | {"api_key": "wrong"}).invoke(MESSAGES)),
        "value": caught(lambda: ChatOpenAI(**OPTIONS, top_p=2).invoke(MESSAGES)),
        "model": caught(lambda: ChatOpenAI(**OPTIONS | {"model": "another"}).invoke(MESSAGES)),
    }


report(
    refusal=[refusals],
    chat=[chat, chat_stream, asynchronous, batch],
    text=[text, text_stream],
    fox=[structured, tools],
)
