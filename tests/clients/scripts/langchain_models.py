"""`langchain-openai`: its chat model and its completion model."""

import asyncio
from typing import Any

from harness import GIVEN, caught, report
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

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


class Fox(BaseModel):
    """Whether a fox is brave."""

    model_config = ConfigDict(extra="forbid")

    brave: bool


def usage_of(message: Any) -> list[int]:
    return [message.usage_metadata[name] for name in ("input_tokens", "output_tokens", "total_tokens")]


def joined(chunks: list[Any]) -> dict[str, Any]:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    pieces = [chunk.content for chunk in chunks if chunk.content]
    return {"text": whole.content, "pieces": pieces, "usage": usage_of(whole)}


def chat() -> Any:
    answer = chat_model.invoke(MESSAGES)
    return {"text": answer.content, "usage": usage_of(answer)}


def chat_stream() -> Any:
    return joined(list(chat_model.stream(MESSAGES)))


def asynchronous() -> Any:
    async def streamed() -> dict[str, Any]:
        return joined([chunk async for chunk in chat_model.astream(MESSAGES)])

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
    pieces = [piece for piece in text_model.stream(GIVEN["prompt"]) if piece]
    return {"text": "".join(pieces), "pieces": pieces}


def structured() -> Any:
    model = ChatOpenAI(**OPTIONS | {"max_tokens": 60})
    return model.with_structured_output(Fox, method="json_schema").invoke(MESSAGES).model_dump()


def tools() -> Any:
    model = ChatOpenAI(**OPTIONS | {"max_tokens": 60})
    bound = model.bind_tools([Fox], tool_choice="Fox")
    streamed = list(bound.stream(MESSAGES))
    whole = streamed[0]
    for chunk in streamed[1:]:
        whole += chunk
    parsed = model.with_structured_output(Fox, method="function_calling").invoke(MESSAGES)
    return [
        *(call["args"] for call in (*bound.invoke(MESSAGES).tool_calls, *whole.tool_calls)),
        parsed.model_dump(),
    ]


def refusals() -> Any:
    return {
        "key": caught(lambda: ChatOpenAI(**OPTIONS | {"api_key": "wrong"}).invoke(MESSAGES)),
        "value": caught(lambda: ChatOpenAI(**OPTIONS, top_p=2).invoke(MESSAGES)),
        "model": caught(lambda: ChatOpenAI(**OPTIONS | {"model": "another"}).invoke(MESSAGES)),
        "next": chat(),
    }


report(chat, chat_stream, asynchronous, batch, text, text_stream, structured, tools, refusals)
