"""`/v1/messages`: Anthropic's own library against a server, and what its answers say beside chat's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from pydantic import BaseModel

from tests.server.test_reasoning import ANSWER, ASKED, THINKS, THOUGHT
from tests.server.test_tools import SCHEMAS, TOOLS
from tests.support.servers import MESSAGES, ServerProcess, answer_of, read_events, rendered

if TYPE_CHECKING:  # importing it takes two seconds in every test worker
    import anthropic
    from anthropic.types import Message, MessageParam

SYSTEM, USER = (message["content"] for message in MESSAGES)
ASK: list[MessageParam] = [{"role": "user", "content": USER}]
FOX_TOOLS: list[Any] = [
    {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
    | ({"description": each["function"]["description"]} if "description" in each["function"] else {})
    for each in TOOLS
]
ENDLESS = {"ignore_eos": True}
# Fields that the library does not know.
EXTENSIONS = ("cache_salt", "ignore_eos", "n", "structured_outputs", "temperature")


def library(server: ServerProcess, **settings: Any) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(**{"base_url": server.url, "api_key": "any", "max_retries": 0} | settings)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with library(server) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    """Return arguments of the library's `create` or `stream`."""
    given = {"model": "zoo:llama-tiny", "messages": ASK, "max_tokens": 20, "temperature": 0} | fields
    extra = {name: given.pop(name) for name in EXTENSIONS if name in given}
    return given | {"extra_body": extra}


def text_of(message: Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def prompt_tokens(message: Message) -> int:
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


# ---------------------------------------------------------------------- text


@pytest.mark.parametrize(
    "system",
    [
        SYSTEM,
        [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": SYSTEM}],
    ],
)
def test_an_answer_is_the_same_as_in_chat(
    server: ServerProcess, client: anthropic.Anthropic, system: Any
) -> None:
    chat = answer_of(server.ask("/v1/chat/completions", max_tokens=20, ignore_eos=True))
    blocks: list[Any] = [{"role": "user", "content": [{"type": "text", "text": USER}]}]
    for messages in (ASK, blocks):
        message = client.messages.create(**body(system=system, messages=messages, **ENDLESS))
        assert text_of(message) == chat["choices"][0]["message"]["content"]
        assert (message.stop_reason, message.model, message.role) == ("max_tokens", server.model, "assistant")
        assert (prompt_tokens(message), message.usage.output_tokens) == (len(rendered(MESSAGES)), 20)
        assert message.id.startswith("msg_")
        assert message._request_id is not None
        counted = client.messages.count_tokens(model=server.model, system=system, messages=messages)
        assert counted.input_tokens == prompt_tokens(message)


def test_an_answer_sent_back_is_a_turn(client: anthropic.Anthropic) -> None:
    first = client.messages.create(**body())
    turns: list[Any] = [*ASK, first.to_param(), {"role": "user", "content": "And then?"}]
    second = client.messages.create(**body(messages=turns))
    told = [*ASK, {"role": "assistant", "content": text_of(first)}, turns[-1]]
    assert prompt_tokens(second) == len(rendered(told))


def test_a_stream_has_anthropics_events(server: ServerProcess, client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**body())
    with client.messages.stream(**body()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(whole)
    assert (final.stop_reason, prompt_tokens(final)) == (whole.stop_reason, prompt_tokens(whole))
    assert final.usage.output_tokens == whole.usage.output_tokens
    sent = {"messages": ASK, "max_tokens": 20, "temperature": 0, "stream": True}
    events = list(read_events(server.client.post("/v1/messages?beta=true", json=sent)))
    assert all(name == data["type"] for name, data in events)
    deltas = [name for name, _ in events].count("content_block_delta")
    assert [name for name, _ in events] == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert deltas > 5
    begun = events[0][1]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)


@pytest.mark.parametrize("streams", [False, True])
def test_the_stop_sequence_is_named(client: anthropic.Anthropic, streams: bool) -> None:
    whole = text_of(client.messages.create(**body(**ENDLESS)))
    fields = body(stop_sequences=["\u2603"] * 39 + [whole[7:12]], **ENDLESS)
    if streams:
        with client.messages.stream(**fields) as stream:
            message: Any = stream.get_final_message()
    else:
        message = client.messages.create(**fields)
    assert text_of(message) == whole[: whole.index(whole[7:12])]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", whole[7:12])


def test_an_answer_that_ends_its_turn(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**body(max_tokens=8_000, output_config={"effort": "high"}))
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


def test_a_cache_is_warmed_without_an_answer(client: anthropic.Anthropic) -> None:
    system = "Answer in one short sentence, and never name the animal. " * 4
    for streams in (False, True):
        asked = body(system=system, cache_salt=f"warmed {streams}", max_tokens=0)
        if streams:
            with client.messages.stream(**asked) as stream:
                warmed = stream.get_final_message()
        else:
            warmed = client.messages.create(**asked)
        assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
        warm, cold = (
            client.messages.create(**body(system=system, cache_salt=salt, max_tokens=8))
            for salt in (f"warmed {streams}", f"cold {streams}")
        )
        assert warm.usage.cache_read_input_tokens > cold.usage.cache_read_input_tokens == 0
        assert text_of(warm) == text_of(cold)


def test_an_answer_follows_a_schema(client: anthropic.Anthropic) -> None:
    class Fox(BaseModel):
        brave: bool

    parsed = client.messages.parse(**body(output_format=Fox, max_tokens=60))
    assert isinstance(parsed.parsed_output, Fox)
    asked = body(max_tokens=60)  # as the beta structured-outputs-2025-11-13 sends it
    schema = Fox.model_json_schema() | {"additionalProperties": False}
    asked["extra_body"]["output_format"] = {"type": "json_schema", "schema": schema}
    assert Fox.model_validate_json(text_of(client.messages.create(**asked))) == parsed.parsed_output


# ---------------------------------------------------------------------- tools


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any", "disable_parallel_tool_use": True}, set(SCHEMAS)),
        ({"type": "tool", "name": "hide"}, {"hide"}),
    ],
)
def test_a_tool_loop(
    server: ServerProcess, client: anthropic.Anthropic, choice: Any, names: set[str], streams: bool
) -> None:
    fields = body(tools=FOX_TOOLS, tool_choice=choice, max_tokens=150)
    if streams:
        with client.messages.stream(**fields) as stream:
            first: Any = stream.get_final_message()
    else:
        first = client.messages.create(**fields)
    (call,) = first.content
    assert (first.stop_reason, call.type) == ("tool_use", "tool_use")
    assert call.name in names
    jsonschema.validate(call.input, SCHEMAS[call.name])
    for content in ("One fox.", [{"type": "text", "text": "One fox."}]):
        result = {"type": "tool_result", "tool_use_id": call.id, "content": content, "is_error": True}
        answered = [result, {"type": "text", "text": "Thanks."}]
        turns = [*ASK, first.to_param(), {"role": "user", "content": answered}]
        second = client.messages.create(**body(messages=turns, tools=FOX_TOOLS))
        function = {"name": call.name, "arguments": json.dumps(call.input)}
        told = [
            *ASK,
            {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.id, "content": "One fox."},
            {"role": "user", "content": "Thanks."},
        ]
        sent = {"messages": told, "tools": TOOLS}
        assert prompt_tokens(second) == answer_of(server.client.post("/tokenize", json=sent))["count"]


def test_the_librarys_own_loop_sends_the_whole_conversation(client: anthropic.Anthropic) -> None:
    """The library would keep the conversation at the server (`thread`), unless the server says that it cannot."""
    import anthropic

    called = []

    @anthropic.beta_tool
    def find_fox(brave: bool) -> str:
        called.append(brave)
        return "There is one fox."

    asked = body(tools=[find_fox], tool_choice={"type": "tool", "name": "find_fox"}, max_tokens=100)
    first, second = client.beta.messages.tool_runner(**asked, max_iterations=2)
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "tool_use")
    assert len(called) == 2
    assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) > first.usage.input_tokens


def test_a_call_that_is_cut_off_has_the_input_so_far(client: anthropic.Anthropic) -> None:
    fields = body(tools=FOX_TOOLS, tool_choice={"type": "tool", "name": "find_fox"}, max_tokens=60)
    whole = client.messages.create(**fields)
    for cut in range(whole.usage.output_tokens - 1, 0, -17):
        with client.messages.stream(**fields | {"max_tokens": cut}) as stream:
            streamed = stream.get_final_message()
        message = client.messages.create(**fields | {"max_tokens": cut})
        assert (message.stop_reason, streamed.stop_reason) == ("max_tokens", "max_tokens")
        assert [block.model_dump(exclude={"id"}) for block in message.content] == [
            block.model_dump(exclude={"id"}, include=set(type(block).model_fields))
            for block in streamed.content
        ]


# ---------------------------------------------------------------------- thoughts


def test_thoughts_are_blocks(thinker: ServerProcess) -> None:
    with library(thinker) as client:
        fields = body(model=thinker.model, messages=ASKED, max_tokens=64, **THINKS)
        message = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            streamed = stream.get_final_message()
        for each in (message, streamed):
            thought, text = each.content
            assert (thought.type, text.type) == ("thinking", "text")
            assert (thought.thinking, text.text) == (THOUGHT, ANSWER)  # type: ignore[union-attr]
            assert thought.signature  # type: ignore[union-attr]
        turns = [*ASKED, message.to_param(), *ASKED]
        hidden: Any = {"type": "redacted_thinking", "data": "x"}
        with_hidden = [*ASKED, {"role": "assistant", "content": [hidden, *message.content]}, *ASKED]
        counts = [
            client.messages.count_tokens(model=thinker.model, messages=each).input_tokens
            for each in (turns, with_hidden)
        ]
        told = [*ASKED, {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}, *ASKED]
        chat = answer_of(thinker.client.post("/tokenize", json={"messages": told}))["count"]
        assert counts == [chat, chat]


def test_thinking_is_the_templates_variable(thinker: ServerProcess) -> None:
    def count(**fields: Any) -> int:
        with library(thinker) as client:
            return client.messages.count_tokens(model=thinker.model, messages=ASKED, **fields).input_tokens

    empty = count(thinking={"type": "disabled"})
    chat = {"messages": ASKED, "chat_template_kwargs": {"enable_thinking": False}}
    assert empty == answer_of(thinker.client.post("/tokenize", json=chat))["count"] > count()
    assert (
        count(thinking={"type": "enabled", "budget_tokens": 1024})
        == count(thinking={"type": "adaptive"})
        == count()
    )


# ---------------------------------------------------------------------- errors


BLOCK = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"system": "word " * 5000}, "prompt is too long: at least "),
        ({"n": 2}, "n"),
        ({"model": "claude"}, "zoo:llama-tiny"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "'f'"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type: 'image'",
        ),
        ({"messages": [{"role": "user", "content": [BLOCK]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "tool_use_id",
        ),
    ],
)
def test_refusals_are_the_librarys_errors(client: anthropic.Anthropic, fields: Any, says: str) -> None:
    import anthropic

    unknown = "model" in fields
    with pytest.raises(anthropic.NotFoundError if unknown else anthropic.BadRequestError) as raised:
        client.messages.create(**body(**fields))
    kind = "not_found_error" if unknown else "invalid_request_error"
    told: Any = raised.value.body
    assert (told["type"], told["error"]["type"], told["request_id"]) == (
        "error",
        kind,
        raised.value.request_id,
    )
    assert says in told["error"]["message"]


def test_refusals_before_and_beside_the_route(server: ServerProcess) -> None:
    for response, status, kind in (
        (server.client.get("/v1/messages"), 405, "invalid_request_error"),
        (server.client.post("/v1/messages/batches", json={}), 404, "not_found_error"),
        (server.client.post("/v1/messages", content=b"{}"), 400, "invalid_request_error"),
        (
            server.client.post("/v1/messages", json={}, headers={"x-request-id": "a b"}),
            400,
            "invalid_request_error",
        ),
    ):
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert response.json()["type"] == "error"
