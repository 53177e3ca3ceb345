"""`instructor`: answers as pydantic models, by tool calls and by JSON Schemas."""

from typing import Any, Literal

import instructor
import openai
from harness import GIVEN, caught, report
from pydantic import BaseModel


class Fox(BaseModel):
    """A fox of a story."""

    colour: Literal["red", "white"]
    brave: bool


CLIENT = openai.OpenAI(base_url=GIVEN["base_url"], api_key=GIVEN["key"], max_retries=0)
ASKED: dict[str, Any] = {
    "model": GIVEN["model"],
    "messages": GIVEN["messages"],
    "temperature": 0,
    "max_tokens": 80,
    "max_retries": 0,
}


def patched(mode: instructor.Mode) -> Any:
    return instructor.from_openai(CLIENT, mode=mode)


def tools() -> Any:
    return [
        patched(mode).create(response_model=Fox, **ASKED).model_dump()
        for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT)
    ]


def schema() -> Any:
    return patched(instructor.Mode.JSON_SCHEMA).create(response_model=Fox, **ASKED).model_dump()


def partial() -> Any:
    pieces = list(patched(instructor.Mode.TOOLS).create_partial(response_model=Fox, **ASKED))
    return {"first": pieces[0].model_dump(), "last": pieces[-1].model_dump(), "pieces": len(pieces)}


def refusals() -> Any:
    return {
        "value": caught(lambda: patched(instructor.Mode.TOOLS).create(response_model=Fox, **ASKED, top_p=2)),
        "next": schema(),
    }


report(tools, schema, partial, refusals)
