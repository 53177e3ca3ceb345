"""`litellm`: the library behind its proxy."""

import asyncio
from typing import Any

import litellm
from harness import GIVEN, caught, report, usage_of

OPTIONS: dict[str, Any] = {
    "api_base": GIVEN["base_url"],
    "api_key": GIVEN["key"],
    "temperature": 0,
    "max_tokens": GIVEN["max_tokens"],
    "num_retries": 0,
}
CHAT: dict[str, Any] = OPTIONS | {"model": f"openai/{GIVEN['model']}", "messages": GIVEN["messages"]}
TEXT: dict[str, Any] = OPTIONS | {
    "model": f"text-completion-openai/{GIVEN['model']}",
    "prompt": GIVEN["prompt"],
}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def joined(chunks: list[Any]) -> dict[str, Any]:
    deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    pieces = [piece for piece in deltas if piece]
    (usage,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    return {"text": "".join(pieces), "pieces": pieces, "usage": usage_of(usage)}


def chat() -> Any:
    answer = litellm.completion(**CHAT)
    return {"text": answer.choices[0].message.content, "usage": usage_of(answer.usage)}


def chat_stream() -> Any:
    return joined(list(litellm.completion(**CHAT, **STREAM)))


def asynchronous() -> Any:
    async def streamed() -> dict[str, Any]:
        return joined([chunk async for chunk in await litellm.acompletion(**CHAT, **STREAM)])

    async def all_of_them() -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(streamed() for _ in range(3))))

    return asyncio.run(all_of_them())


def tools() -> Any:
    """A required call, whole and streamed."""
    schema = {
        "type": "object",
        "properties": {"place": {"enum": ["forest", "river"]}},
        "required": ["place"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "find_fox", "parameters": schema}}
    asked = CHAT | {
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 100,
    }
    (call,) = litellm.completion(**asked).choices[0].message.tool_calls
    chunks = list(litellm.completion(**asked, **STREAM))
    rebuilt = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    return [[each.function.name, each.function.arguments] for each in (call, *rebuilt)]


def text() -> Any:
    answer = litellm.text_completion(**TEXT)
    return {"text": answer.choices[0].text, "usage": usage_of(answer.usage)}


def text_stream() -> Any:
    chunks = litellm.text_completion(**TEXT, stream=True)
    pieces = [piece for chunk in chunks if chunk.choices and (piece := chunk.choices[0].text)]
    return {"text": "".join(pieces), "pieces": pieces}


def refusals() -> Any:
    return {
        "key": caught(lambda: litellm.completion(**CHAT | {"api_key": "wrong"})),
        "value": caught(lambda: litellm.completion(**CHAT, top_p=2)),
        "model": caught(lambda: litellm.completion(**CHAT | {"model": "openai/another"})),
        "in a stream": caught(lambda: list(litellm.completion(**CHAT, top_p=2, stream=True))),
        "next": chat(),
    }


report(chat, chat_stream, asynchronous, tools, text, text_stream, refusals)
