"""`litellm`: the library behind its proxy."""

import asyncio
import json
from typing import Any

import litellm
from fox import Fox
from harness import GIVEN, caught, joined, report, usage_of

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


def gathered(chunks: list[Any]) -> dict[str, Any]:
    (usage,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    pieces = joined(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
    return pieces | {"usage": usage_of(usage)}


def chat() -> Any:
    answer = litellm.completion(**CHAT)
    return {"text": answer.choices[0].message.content, "usage": usage_of(answer.usage)}


def chat_stream() -> Any:
    return gathered(list(litellm.completion(**CHAT, **STREAM)))


def asynchronous() -> Any:
    async def streamed() -> dict[str, Any]:
        return gathered([chunk async for chunk in await litellm.acompletion(**CHAT, **STREAM)])

    async def all_of_them() -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(streamed() for _ in range(3))))

    return asyncio.run(all_of_them())


def text() -> Any:
    answer = litellm.text_completion(**TEXT)
    return {"text": answer.choices[0].text, "usage": usage_of(answer.usage)}


def text_stream() -> Any:
    chunks = litellm.text_completion(**TEXT, stream=True)
    return joined(chunk.choices[0].text for chunk in chunks if chunk.choices)


def tools() -> Any:
    fox = {
        "type": "function",
        "function": {"name": "find_fox", "parameters": Fox.model_json_schema()},
    }
    asked = CHAT | {"max_tokens": GIVEN["call_tokens"], "tools": [fox]}
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    named = {"tool_choice": {"type": "function", "function": {"name": "find_fox"}}}
    whole = litellm.completion(**asked, **one)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, **named, stream=True)))
    message = whole.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "There is one fox."}
    told = asked | {"messages": [*GIVEN["messages"], message, result]}
    assert litellm.completion(**told).choices[0].message.content
    return [called_fox(answer) for answer in (whole, streamed)]


def called_fox(answer: Any) -> Any:
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "find_fox")
    return json.loads(call.function.arguments)


def refusals() -> Any:
    long = [{"role": "user", "content": "word " * 100_000}]
    too_long = caught(lambda: litellm.completion(**CHAT | {"messages": long}))
    assert "ContextWindowExceededError" in too_long["types"], too_long
    return {
        "key": caught(lambda: litellm.completion(**CHAT | {"api_key": "wrong"})),
        "value": caught(lambda: litellm.completion(**CHAT, top_p=2)),
        "model": caught(lambda: litellm.completion(**CHAT | {"model": "openai/another"})),
        "in a stream": caught(lambda: list(litellm.completion(**CHAT, top_p=2, stream=True))),
    }


report(
    refusal=[refusals],
    chat=[chat, chat_stream, asynchronous],
    text=[text, text_stream],
    fox=[tools],
)
