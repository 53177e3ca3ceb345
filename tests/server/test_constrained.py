"""Constrained answers over HTTP: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import psutil
import pytest

from tests.support.servers import (
    ServerProcess,
    eventually,
    texts,
)

PROMPT = "Once upon a time"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"},
        "age": {"type": "integer", "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}

#: Fields of a request, and a regular expression that its answer matches.
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": JSON_SCHEMA}, r"\{[^{}]*\}"),
    ({"structured_outputs": {"json": SCHEMA}}, r"\{[^{}]*\}"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, r"\{[^{}]*\}"),
    ({"structured_outputs": {"regex": "[0-9]{3}-(red|blue)"}}, "[0-9]{3}-(red|blue)"),
    ({"structured_outputs": {"choice": ["a fox", "ein Bär", "🦊"]}}, "a fox|ein Bär|🦊"),
    ({"structured_outputs": {"choice": ["a \ufffd🦊\ufffd"]}}, "a \ufffd🦊\ufffd"),
    ({"structured_outputs": {"grammar": 'start: "x" Y{2}\nY: "y" | "z"'}}, "x[yz]{2}"),
    (
        {"structured_outputs": {"grammar": 'root ::= "x" ("y" | "z")'}, "response_format": {"type": "text"}},
        "x[yz]",
    ),
    # guidance bounds a text so, and sends vLLM's old name of the field, too.
    (
        {
            "guided_grammar": "not a grammar",
            "structured_outputs": {
                "grammar": '%llguidance {}\nstart: a "."\na[capture, max_tokens=4]: /[a-z]+/'
            },
        },
        r"[a-z]+\.",
    ),
    ({"structured_outputs": {"grammar": 'start: a " end"\na[stop="."]: /(?s:.*)/'}}, ".* end"),
    ({"guided_json": SCHEMA}, r"\{[^{}]*\}"),
    ({"guided_choice": ["yes", "no"], "guided_decoding_backend": "xgrammar"}, "yes|no"),
    ({"regex": "(yes|no)", "ebnf": None}, "yes|no"),
    ({"ebnf": 'root ::= "x" ("y" | "z")'}, "x[yz]"),
    ({"json_schema": SCHEMA, "grammar": ""}, r"\{[^{}]*\}"),
]


@pytest.mark.parametrize(("fields", "pattern"), FORMS, ids=str)
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_answers_follow_each_form(
    server: ServerProcess, fields: dict[str, Any], pattern: str, temperature: float
) -> None:
    asked = fields | {"max_tokens": 120, "temperature": temperature, "seed": 3}
    (choice,) = server.complete(**asked)["choices"]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["text"], re.DOTALL)
    if choice["text"].startswith("{"):
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert texts(server.events(**asked)) == {0: choice["text"]}


def test_any_json_object(server: ServerProcess) -> None:
    """An answer that ends at `max_tokens` is the beginning of an object."""
    fields = {"prompt": '{"name": "Ann"}\n', "max_tokens": 150, "response_format": {"type": "json_object"}}
    for seed in range(4):
        (choice,) = server.complete(**fields, temperature=1, seed=seed)["choices"]
        assert choice["text"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["text"]), dict)


def test_every_choice_follows_the_form(server: ServerProcess) -> None:
    regex = "([a-z]{2} ){3}[0-9]"
    fields = {"prompt": [PROMPT, "The"], "n": 3, "temperature": 1.5, "seed": 1, "max_tokens": 30}
    answer = server.complete(**fields, structured_outputs={"regex": regex})
    found = [choice["text"] for choice in answer["choices"]]
    assert all(re.fullmatch(regex, text) for text in found)
    assert len(set(found)) > 1
    events = server.events(**fields, structured_outputs={"regex": regex})
    assert list(texts(events).values()) == found


def test_a_constrained_answer_may_be_cut_by_max_tokens(server: ServerProcess) -> None:
    (choice,) = server.complete(max_tokens=5, structured_outputs={"regex": "[0-9]{20}"})["choices"]
    assert choice["finish_reason"] == "length"
    (choice,) = server.complete(ignore_eos=True, structured_outputs={"choice": ["yes"]})["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("yes", "stop")


# ---------------------------------------------------------------------- the end


@pytest.mark.slow
def test_the_compilers_process_ends_with_the_server(phase: str) -> None:
    process = ServerProcess(phase)
    process.complete(structured_outputs={"choice": ["a"]})
    children = psutil.Process(process.process.pid).children()
    (child,) = [each for each in children if any("constrained/trial" in word for word in each.cmdline())]
    process.process.kill()
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    process.wait()
