"""Tools in chat: the calls of an answer, whole and streamed, combined with the other fields that shape answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common.models.registry import ZOO, open_checkpoint
from tests.support.servers import (
    MESSAGES,
    ServerProcess,
    answer_of,
    app_with,
    assert_error,
)

SCHEMAS: dict[str, dict[str, Any]] = {
    "find_fox": {
        "type": "object",
        "properties": {"place": {"enum": ["forest", "river"]}, "at night": {"type": "boolean"}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "hide": {
        "type": "object",
        "properties": {"where": {"type": "string", "pattern": "^[a-z]{3,9}$"}},
        "required": ["where"],
        "additionalProperties": False,
    },
}


def tool(known: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": known, "parameters": SCHEMAS[known]} | more}


TOOLS = [tool("find_fox", description="Look for a fox."), tool("hide")]
STRICT = [tool(name, strict=True) for name in SCHEMAS]
FOX = {"type": "function", "function": {"name": "find_fox"}}
DOTTED = {"type": "function", "function": {"name": f"{'den' * 30}.hide"}}


def ask(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    return answer_of(server.ask("/v1/chat/completions", **{"tools": TOOLS, "max_tokens": 120} | fields))


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """Check the form of each call. Returns name and arguments of each."""
    calls = choice["message"].get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert set(call) == {"id", "type", "function"}
        jsonschema.validate(
            json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"].split(".")[-1]]
        )
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def settled(chunks: list[dict[str, Any]], choices: int) -> list[dict[str, Any]]:
    """Join a stream's chunks to choices, without ids, and check the order of the chunks."""
    whole: list[dict[str, Any]] = [
        {"text": "", "calls": [], "logprobs": [], "reason": None} for _ in range(choices)
    ]
    begun: set[int] = set()
    for chunk in chunks:
        for part in chunk["choices"]:
            choice, delta = whole[part["index"]], part["delta"]
            assert choice["reason"] is None, "nothing comes behind the reason"
            assert ("role" in delta) is (part["index"] not in begun), "the role comes first, and once"
            begun.add(part["index"])
            choice["text"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(choice["calls"])
                    assert (call["type"], call["function"]["arguments"]) == ("function", "")
                    choice["calls"].append([call["function"]["name"], ""])
                else:
                    assert set(call) == {"index", "function"}
                    assert call["index"] == len(choice["calls"]) - 1
                    choice["calls"][-1][1] += call["function"]["arguments"]
            choice["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            choice["reason"] = part["finish_reason"]
    return whole


def same(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON answer's choice in the form of `settled`."""
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return {
        "text": message["content"] or "",
        "calls": [[function["name"], function["arguments"]] for function in functions],
        "logprobs": (choice["logprobs"] or {"content": []})["content"],
        "reason": choice["finish_reason"],
    }


# ---------------------------------------------------------------------- the choice of tools


@pytest.mark.parametrize("wanted", [FOX, DOTTED], ids=["plain", "dotted"])
def test_a_function_of_the_allowed_ones_is_called(server: ServerProcess, wanted: dict[str, Any]) -> None:
    named = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [wanted]}}
    fields = {"tools": [*TOOLS, tool("hide", **DOTTED["function"])], "tool_choice": named}
    for seed in range(3):
        answer = ask(server, **fields, parallel_tool_calls=False, temperature=1.2, seed=seed)
        (choice,) = answer["choices"]
        ((name, _),) = calls_of(choice)
        assert (name, choice["finish_reason"]) == (wanted["function"]["name"], "tool_calls")


def test_a_type_that_can_only_be_one_may_be_missing(server: ServerProcess) -> None:
    """`huggingface_hub` has no field for it in its choice of a tool."""
    tools = [{"function": each["function"]} for each in TOOLS]
    (choice,) = ask(server, tools=tools, tool_choice={"function": FOX["function"]})["choices"]
    ((name, _),) = calls_of(choice)
    assert name == "find_fox"


def test_none_tells_the_model_of_no_tools(server: ServerProcess) -> None:
    none, without = ask(server, tool_choice="none"), ask(server, tools=None)
    assert none["choices"] == without["choices"]
    assert none["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]


def test_a_strict_call_may_come_and_then_follows_its_schema(server: ServerProcess) -> None:
    """The text must be a number. If a bias forbids all digits, only a call is possible."""
    tokenizer = open_checkpoint("zoo:llama-tiny").tokenizer()
    digits = [i for i in range(tokenizer.vocab_size) if set("-0123456789") & set(tokenizer.decode([i]))]
    number = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "integer", "minimum": 10}},
    }
    fields = {"tools": STRICT, "response_format": number, "parallel_tool_calls": False, "temperature": 1}
    for seed in range(3):
        (choice,) = ask(server, **fields, seed=seed, logit_bias={str(i): -100 for i in digits})["choices"]
        assert len(calls_of(choice)) == 1
        assert choice["finish_reason"] == "tool_calls"
        (choice,) = ask(server, **fields, seed=seed, logit_bias={str(tokenizer.encode("<")[-1]): -100})[
            "choices"
        ]
        assert int(choice["message"]["content"]) >= 10
        assert (choice["finish_reason"], calls_of(choice)) == ("stop", [])


# ---------------------------------------------------------------------- every field beside tools

STOP = ["forest", "ere"]


@pytest.mark.parametrize("choice", ["required", "auto", "named"])
def test_a_stream_adds_up_to_the_answer(server: ServerProcess, choice: str) -> None:
    """Several choices, stop strings, log-probabilities and tools in one request."""
    fields: dict[str, Any] = {"n": 3, "stop": STOP, "temperature": 1, "seed": 5, "max_tokens": 90}
    fields |= {"tools": STRICT, "tool_choice": FOX if choice == "named" else choice}
    fields |= {"logprobs": True, "top_logprobs": 2}
    answer = ask(server, **fields)
    usage = {"include_usage": True}
    *chunks, last = server.chunks("/v1/chat/completions", stream_options=usage, **fields)
    whole = [same(each) for each in answer["choices"]]
    assert settled(chunks, 3) == whole
    assert last["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert sum(len(each["logprobs"]) for each in whole) == answer["usage"]["completion_tokens"]
    for each in answer["choices"]:
        if each["finish_reason"] == "tool_calls":
            assert calls_of(each)
        said = json.dumps(each["message"])
        assert not any(text in said for text in STOP)
        if choice != "auto":
            assert each["message"]["content"] is None


def test_a_stop_string_within_a_call_breaks_it_off(server: ServerProcess) -> None:
    fields = {"tool_choice": FOX, "tools": [tool("find_fox")]}
    (choice,) = ask(server, **fields, stop='"place')["choices"]
    assert choice["finish_reason"] == "stop"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "find_fox", "arguments": "{"}
    (choice,) = ask(server, **fields, max_tokens=2)["choices"]
    assert (choice["finish_reason"], calls_of(choice)) == ("length", [])


# ---------------------------------------------------------------------- a conversation with calls


def test_calls_and_results_go_back(server: ServerProcess) -> None:
    (choice,) = ask(server, tool_choice=FOX)["choices"]
    (call,) = choice["message"]["tool_calls"]
    asked = [*MESSAGES, choice["message"]]
    lengths = []
    for result in ("", "a fox", "a fox and a bear"):
        messages = [*asked, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        lengths.append(ask(server, messages=messages)["usage"]["prompt_tokens"])
    assert lengths == sorted(set(lengths)), "the model reads the result"
    broken = {**call, "function": {"name": "find_fox", "arguments": '{"place": "riv'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [broken]}]
    assert ask(server, messages=messages, tools=None)["usage"]["prompt_tokens"] > 0


#: JSON texts that no prompt can show as objects: half a surrogate pair, and too many levels.
NO_OBJECTS = {"surrogate": '{"place": "\\ud83d"}', "deep": '{"place":' * 1500 + "1" + "}" * 1500}


@pytest.mark.parametrize("arguments", NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_arguments_that_are_no_object_go_back_as_text(server: ServerProcess, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find_fox", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ask(server, messages=messages, tools=None, max_tokens=4, truncate_prompt_tokens=-1)
    tokens = answer_of(server.client.post("/tokenize", json={"messages": messages}))["tokens"]
    text = answer_of(server.client.post("/detokenize", json={"tokens": tokens}))["prompt"]
    assert json.dumps(arguments) in text
    item = {"type": "function_call", "call_id": "1", "name": "find_fox", "arguments": arguments}
    answer_of(server.ask("/v1/responses", input=[*MESSAGES, item], truncation="auto"))


# ---------------------------------------------------------------------- schemas that no grammar follows


# Schemas that clients' libraries write for ordinary functions, and the keyword that no grammar follows.
UNFOLLOWED: dict[str, tuple[dict[str, Any], str]] = {
    "a map": ({"type": "object", "propertyNames": {"minLength": 1}}, "propertyNames"),
    "a set": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
}


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_a_schema_that_no_grammar_follows_is_refused_only_where_a_call_is_required(
    server: ServerProcess, name: str
) -> None:
    schema, keyword = UNFOLLOWED[name]
    function = name.replace(" ", "_")  # the server's log holds the other cases' functions, too
    parameters = {"type": "object", "properties": {"a": schema}}
    bad = tool("hide", name=function, parameters=parameters, strict=True)
    tools = [*STRICT, bad]
    for fields in ({}, {"parallel_tool_calls": False}, {"tool_choice": FOX}):
        ask(server, tools=tools, max_tokens=4, **fields)
    refused = server.ask("/v1/chat/completions", tools=tools, tool_choice="required")
    assert_error(refused, 422, "tools", says=keyword)
    assert f"function '{function}'" in refused.json()["error"]["message"]
    (told,) = [each for each in server.log if f"'{function}' need not follow its schema" in each]
    assert keyword in told


# ---------------------------------------------------------------------- other templates, and options

#: A template that shows tools as Llama 3's does.
TEMPLATE = """\
{{- bos_token }}{% if tools %}{{ tools | map(attribute='function.name') | join(' ') }}{% endif %}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments.place }}{% endfor %}
{%- endfor %}{{ '[assistant]' if add_generation_prompt }}{# <|python_tag|> arguments #}"""


#: As Mistral's, it refuses ids of other lengths.
MISTRALS = TEMPLATE.replace("<|python_tag|>", "[TOOL_CALLS]").replace(
    "{{ call.function.name }}",
    "{{ raise_exception('nine') if call.id | length != 9 }}{{ call.function.name }}",
)


@pytest.fixture(scope="module", params=["llama3_json", "mistral", "pythonic"])
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server for each syntax of calls but Hermes's. The first two templates show tools."""
    model = ZOO / ("gemma3-tiny" if request.param == "pythonic" else "llama-tiny")
    folder = Path(shutil.copytree(model, tmp_path_factory.mktemp("other") / "model"))
    if request.param != "pythonic":
        source = TEMPLATE if request.param == "llama3_json" else MISTRALS
        (folder / "chat_template.jinja").write_text(source)
    with ServerProcess("phase9_pipelined", "--model", str(folder), "--max-seq-len", "1024") as process:
        yield process
        assert "Traceback" not in process.log_text


@pytest.mark.parametrize("thing", ["required", "named", "dotted", "several"])
def test_each_syntax_is_followed_and_read(other: ServerProcess, thing: str) -> None:
    tools = [*STRICT, tool("hide", **DOTTED["function"])]
    fields: dict[str, Any] = {"tools": tools, "temperature": 1, "seed": 2, "n": 4, "max_tokens": 900}
    fields |= {
        "tool_choice": {"named": FOX, "dotted": DOTTED}.get(thing, "required"),
        "parallel_tool_calls": thing == "several",
    }
    answer = ask(other, **fields)
    ended = [each for each in answer["choices"] if each["finish_reason"] == "tool_calls"]
    assert ended
    for choice in ended:
        assert choice["message"]["content"] is None
        names = [name for name, _ in calls_of(choice)]
        assert len(names) == 1 or thing == "several"
        assert names == [DOTTED["function"]["name"]] or thing != "dotted"
    chunks = other.chunks("/v1/chat/completions", **fields)
    assert settled(chunks, 4) == [same(each) for each in answer["choices"]]


@pytest.mark.parametrize("other", ["llama3_json", "mistral"], indirect=True)
def test_a_template_that_knows_tools_writes_them(other: ServerProcess) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "find_fox", "arguments": '{"place": "river"}'},
    }
    messages = [
        {"role": "user", "content": "Fox?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "none"},
    ]
    body = {"model": other.model, "messages": messages, "tools": TOOLS}
    tokens = other.client.post("/tokenize", json=body).json()["tokens"]
    text = other.client.post("/detokenize", json={"model": other.model, "tokens": tokens}).json()["prompt"]
    expected = "find_fox hide[user]Fox?[assistant]find_fox:river[tool]none[assistant]"
    assert text.removeprefix("<|begin_of_text|>") == expected


def test_a_server_without_a_parser_refuses_tools() -> None:
    with app_with(tool_call_parser=None) as client:
        body = {"messages": MESSAGES, "max_tokens": 2, "tools": TOOLS}
        response = client.post("/v1/chat/completions", json=body)
        assert_error(response, 422, "tools", says="--tool-call-parser none")
        response = client.post("/v1/chat/completions", json=body | {"tool_choice": "none"})
        assert response.status_code == 200, response.text
