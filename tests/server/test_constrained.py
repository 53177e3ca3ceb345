"""Answers of a form over HTTP: OpenAI's `response_format` and vLLM's `structured_outputs`, by the real client."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import psutil
import pytest

from tests.grammars import AMBIGUOUS, Form
from tests.grammars import FORMS as GRAMMAR_FORMS
from tests.server.support import ServerProcess, assert_error, eventually, texts

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

#: Fields of a request, and what its answer then matches.
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": JSON_SCHEMA}, r"\{[^{}]*\}"),
    ({"structured_outputs": {"json": SCHEMA}}, r"\{[^{}]*\}"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, r"\{[^{}]*\}"),
    ({"structured_outputs": {"regex": "[0-9]{3}-(red|blue)"}}, "[0-9]{3}-(red|blue)"),
    ({"structured_outputs": {"choice": ["a fox", "ein Bär", "🦊"]}}, "a fox|ein Bär|🦊"),
    ({"structured_outputs": {"grammar": 'start: "x" Y{2}\nY: "y" | "z"'}}, "x[yz]{2}"),
    (
        {"structured_outputs": {"grammar": 'root ::= "x" ("y" | "z")'}, "response_format": {"type": "text"}},
        "x[yz]",
    ),
]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(("fields", "pattern"), FORMS, ids=str)
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_json_and_stream(
    client: openai.OpenAI, server: ServerProcess, fields: dict[str, Any], pattern: str, temperature: float
) -> None:
    def create(**more: Any) -> Any:
        return client.completions.create(
            model=server.model,
            prompt=PROMPT,
            max_tokens=120,
            temperature=temperature,
            seed=3,
            extra_body=fields,
            **more,
        )

    (choice,) = create().choices
    assert choice.finish_reason == "stop"
    assert re.fullmatch(pattern, choice.text, re.DOTALL)
    if choice.text.startswith("{"):
        jsonschema.validate(json.loads(choice.text), SCHEMA)
    assert "".join(chunk.choices[0].text for chunk in create(stream=True)) == choice.text


def test_any_json_object(client: openai.OpenAI, server: ServerProcess) -> None:
    """What a client gets that ends too soon is the beginning of one."""
    for seed in range(4):
        answer = client.completions.create(
            model=server.model,
            prompt='{"name": "Ann"}\n',
            max_tokens=150,
            seed=seed,
            extra_body={"response_format": {"type": "json_object"}},
        )
        assert answer.choices[0].text.startswith("{")
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].text), dict)


def test_every_choice_and_prompt_has_a_form_of_its_own(server: ServerProcess) -> None:
    regex = "([a-z]{2} ){3}[0-9]"
    fields = {"prompt": [PROMPT, "The"], "n": 3, "temperature": 1.5, "seed": 1, "max_tokens": 30}
    answer = server.complete(**fields, structured_outputs={"regex": regex})
    found = [choice["text"] for choice in answer["choices"]]
    assert all(re.fullmatch(regex, text) for text in found)
    assert len(set(found)) > 1
    events = server.events(**fields, structured_outputs={"regex": regex})
    assert list(texts(events).values()) == found


def test_an_answer_that_is_cut_says_so(server: ServerProcess) -> None:
    (choice,) = server.complete(max_tokens=5, structured_outputs={"regex": "[0-9]{20}"})["choices"]
    assert choice["finish_reason"] == "length"
    (choice,) = server.complete(ignore_eos=True, structured_outputs={"choice": ["yes"]})["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("yes", "stop")


# ---------------------------------------------------------------------- refusals


def exploding(multiple: int = 999_999) -> dict[str, Any]:
    """A schema that takes too much time to compile: the automaton has a state for each remainder."""
    return {"json": {"type": "integer", "multipleOf": multiple}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}},
        "structured_outputs.json",
        "uniqueItems",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "line 1"),
    ({"structured_outputs": {"regex": "[a"}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"regex": "x" * 70_000}}, "structured_outputs.regex", "70000"),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar", "nowhere"),
    ({"structured_outputs": {"choice": ["x" * 70_000]}}, "structured_outputs.choice", "characters"),
    ({"structured_outputs": exploding()}, "structured_outputs.json", "too much time"),
    ({"structured_outputs": {"grammar": AMBIGUOUS}}, "structured_outputs.grammar", "a trial answer fails"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "text"}},
            }
        },
        "response_format.json_schema.schema",
        "Invalid type: text",
    ),
    (
        {"response_format": JSON_SCHEMA, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "response_format",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": JSON_SCHEMA | {"type": "text"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"structured_outputs": {}}, "structured_outputs", "one of"),
    ({"structured_outputs": {"regex": None}}, "structured_outputs", "one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "not 2"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least 1"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs", "at least 1"),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", "response_format"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "unknown"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "unknown"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "y": 1}}},
        "response_format.json_schema.y",
        "unknown",
    ),
]


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals_name_the_field_and_come_before_the_stream(
    server: ServerProcess, fields: dict[str, Any], param: str, reason: str
) -> None:
    for stream in (False, True):
        response = server.post(stream=stream, **fields)
        assert_error(response, 422, param)
        assert reason in response.json()["error"]["message"]
    (choice,) = server.complete(structured_outputs={"regex": "b{3}"})["choices"]
    assert choice["text"] == "bbb"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
            "response_format",
        ),
        ({"structured_outputs": {"json": 5}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs"),
    ],
    ids=str,
)
def test_wrong_types(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    assert_error(server.post(**fields), 400, param)
    assert server.complete(structured_outputs={"choice": ["c"]})["choices"][0]["text"] == "c"


def test_a_grammar_that_takes_long_holds_up_nobody_else(server: ServerProcess) -> None:
    statuses: list[int] = []
    threads = [
        threading.Thread(
            target=lambda multiple=multiple: statuses.append(
                server.post(structured_outputs=exploding(multiple)).status_code
            )
        )
        for multiple in (999_979, 999_983)  # of no other test: a refusal that is known takes no time
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # they are being compiled, or wait for that
    while not statuses:
        assert server.complete()["usage"]["completion_tokens"] > 0
        assert server.client.get("/health").status_code == 200
    for thread in threads:
        thread.join()
    assert statuses == [422, 422]


def test_the_compilers_process_ends_with_the_server(phase: str) -> None:
    process = ServerProcess(phase)
    process.complete(structured_outputs={"choice": ["a"]})
    (child,) = psutil.Process(process.process.pid).children()
    process.process.kill()
    process.wait()
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    process.read_the_rest()


@pytest.mark.slow
def test_the_same_answers_at_every_depth() -> None:
    """More than twenty schemas as `response_format`, a few at a time, beside others that ask for nothing."""
    schemas = [form for form in GRAMMAR_FORMS if form.grammar.kind == "json_schema"]
    assert len(schemas) >= 20

    def ask(server: ServerProcess, form: Form) -> str:
        schema = {"name": "form", "schema": json.loads(form.grammar.text), "strict": True}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            plain = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=5, stream=False)
            assert plain.usage is not None
            assert plain.usage.completion_tokens == 5
            chunks = client.completions.create(
                model=server.model,
                prompt=PROMPT,
                max_tokens=160,
                temperature=0,
                stream=True,
                extra_body={"response_format": {"type": "json_schema", "json_schema": schema}},
            )
            choices = [choice for chunk in chunks for choice in chunk.choices]
        text = "".join(choice.text for choice in choices)
        if choices[-1].finish_reason == "stop":
            assert form.matches(text), (form.name, text)
        return text + f" {choices[-1].finish_reason}"

    answers = []
    for phase, *options in [
        ("phase8_prefix",),
        *(("phase9_pipelined", "--pipeline-depth", str(depth)) for depth in range(3)),
        ("phase9_pipelined", "--no-captured-steps", "--prefill-mode", "drained"),
    ]:
        server = ServerProcess(phase, "--max-seq-len", "512", *options)
        with ThreadPoolExecutor(4) as pool:
            answers.append(list(pool.map(lambda form, server=server: ask(server, form), schemas)))
        server.close()
    assert all(each == answers[0] for each in answers[1:])
    assert sum(answer.endswith(" stop") for answer in answers[0]) >= 0.8 * len(schemas)
