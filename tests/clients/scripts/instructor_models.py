"""`instructor`: answers as pydantic models, by tool calls and by JSON Schemas."""

from typing import Any

import instructor
import openai
from fox import Fox
from harness import GIVEN, caught, report

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
    assert len(pieces) > 2
    assert pieces[0] != pieces[-1]
    return pieces[-1].model_dump()


def refused() -> Any:
    model = patched(instructor.Mode.TOOLS)
    said = caught(lambda: model.create(response_model=Fox, **ASKED, top_p=2))
    assert "top_p" in said["message"]
    return said


report(said=[refused], fox=[tools, schema, partial])
