"""Models that reason: their thoughts are separated from the answer, in chat and in responses, whole and streamed.

The bundled model gets a template like Qwen 3's, and grammars force it to write thoughts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from common.models.registry import open_checkpoint
from tests.server.test_responses import respond, settled, stream
from tests.support.servers import ServerProcess, answer_of

ASKED: list[Any] = [{"role": "user", "content": "Is the fox brave?"}]
THOUGHT = "Foxes are brave."
ANSWER = "It is."
#: Grammars for the text of a thinking model, and of one whose prompt has opened the thought.
THINKS = {"structured_outputs": {"regex": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}".replace(".", "\\.")}}
GOES_ON = {"structured_outputs": {"regex": f"{THOUGHT}\n</think>\n\n{ANSWER}".replace(".", "\\.")}}


@pytest.fixture
def server(thinker: ServerProcess) -> Iterator[ServerProcess]:
    yield thinker
    thinker.assert_serves()


def chat(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    return answer_of(server.ask("/v1/chat/completions", **{"messages": ASKED, "max_tokens": 64} | fields))


def prompt_tokens(text: str) -> int:
    tokenizer = open_checkpoint("zoo:llama-tiny").tokenizer()
    return len(tokenizer.encode(text, add_special_tokens=False))


# ---------------------------------------------------------------------- chat


@pytest.mark.parametrize("opens", [False, True])
def test_thoughts_are_kept_apart_from_the_answer(server: ServerProcess, opens: bool) -> None:
    fields = {"chat_template_kwargs": {"opens_thought": True}} | GOES_ON if opens else THINKS
    answer = chat(server, **fields)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, ANSWER)
    details = answer["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < answer["usage"]["completion_tokens"]
    usage = {"stream_options": {"include_usage": True}}
    chunks = server.chunks("/v1/chat/completions", messages=ASKED, max_tokens=64, **fields, **usage)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert chunks[-1]["usage"]["completion_tokens_details"] == details
    kinds = [next(iter(delta)) for delta in deltas if delta and "role" not in delta]
    assert kinds == sorted(kinds, reverse=True), "thoughts come first"


def test_an_answer_without_a_thought(server: ServerProcess) -> None:
    for fields in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer = chat(server, structured_outputs={"regex": "It is\\."}, **fields)
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (None, ANSWER)
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_a_thought_that_is_cut_off(server: ServerProcess) -> None:
    answer = chat(server, structured_outputs={"regex": "<think>\n[a-z]{200}"}, max_tokens=20)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"]
    assert not choice["message"]["content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 20


def test_the_template_is_told_whether_to_think(server: ServerProcess) -> None:
    plain, off = (
        chat(server, max_tokens=1, chat_template_kwargs=variables)["usage"]["prompt_tokens"]
        for variables in ({}, {"enable_thinking": False})
    )
    assert off > plain
    low, high = (
        chat(server, max_tokens=1, reasoning_effort=effort)["usage"]["prompt_tokens"]
        for effort in (None, "high")
    )
    assert (low, high > plain) == (plain, True)
    none, variables = (
        chat(server, max_tokens=1, **fields)["usage"]["prompt_tokens"]
        for fields in (
            {"reasoning_effort": "none"},
            {"chat_template_kwargs": {"reasoning_effort": "none", "enable_thinking": False}},
        )
    )
    assert none == variables
    response = server.ask("/v1/responses", input=ASKED, max_output_tokens=1, reasoning={"effort": "high"})
    assert response.json()["usage"]["input_tokens"] == high
    assert response.json()["reasoning"] == {"effort": "high", "summary": None}


def test_a_thought_can_be_sent_back(server: ServerProcess) -> None:
    message = chat(server, **THINKS)["choices"][0]["message"]
    counts = [
        chat(server, messages=[*ASKED, sent], max_tokens=1)["usage"]["prompt_tokens"]
        for sent in (
            message,
            {"role": "assistant", "content": ANSWER, "reasoning": THOUGHT},
            {"role": "assistant", "content": ANSWER},
        )
    ]
    assert counts[0] == counts[1] > counts[2]


# ---------------------------------------------------------------------- responses


def test_a_thought_is_an_item_of_its_own(server: ServerProcess) -> None:
    answer = respond(server, input=ASKED, max_output_tokens=64, **THINKS)
    thought, message = answer["output"]
    assert (thought["type"], thought["summary"], thought["encrypted_content"]) == ("reasoning", [], None)
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert message["content"][0]["text"] == ANSWER
    details = answer["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < answer["usage"]["output_tokens"]
    events = stream(server, input=ASKED, max_output_tokens=64, **THINKS)
    names = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(names)) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_text.delta", "output_text.done", "completed"),
    ]
    assert settled(events[-1]["response"]) == settled(answer)
    places = {event["item_id"]: event["output_index"] for event in events if "item_id" in event}
    assert sorted(places.values()) == [0, 1]


def test_an_answer_that_is_only_a_thought(server: ServerProcess) -> None:
    """If the answer ends after its thought, the message is empty. If it ends within the thought, there is none."""
    fields = {"input": ASKED, "structured_outputs": {"regex": "<think>\nFoxes\\.\n</think>"}}
    whole = respond(server, **fields, max_output_tokens=64)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert (whole["status"], whole["output"][1]["content"][0]["text"]) == ("completed", "")
    cut = respond(
        server, **fields | {"structured_outputs": {"regex": "<think>[a-z]{99}"}}, max_output_tokens=9
    )
    assert [item["type"] for item in cut["output"]] == ["reasoning"]
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")


def test_reasoning_items_go_back_to_the_template(server: ServerProcess) -> None:
    """Also from the AI SDK: it keeps what streams have in `summary` and `encrypted_content`, and no other field."""
    wanted = {"include": ["reasoning.encrypted_content"], "store": False}
    output = respond(server, input=ASKED, max_output_tokens=64, **THINKS, **wanted)["output"]
    events = stream(server, input=ASKED, max_output_tokens=64, **THINKS, **wanted)
    done = next(event["item"] for event in events if event["type"] == "response.output_item.done")
    kept = {name: done[name] for name in ("type", "id", "summary", "encrypted_content")}
    summary = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": THOUGHT}]}
    counts = [
        respond(server, input=[*ASKED, *items], max_output_tokens=1)["usage"]["input_tokens"]
        for items in (output, [kept, output[1]], [summary, output[1]], output[1:])
    ]
    assert counts[0] == counts[1] == counts[2] > counts[3]


# ---------------------------------------------------------------------- schemas


SCHEMA = {"type": "object", "properties": {"brave": {"type": "boolean"}}, "required": ["brave"]}
FORM = {"type": "json_schema", "schema": SCHEMA | {"additionalProperties": False}, "name": "fox"}
CHAT_FORM = {"type": "json_schema", "json_schema": {name: FORM[name] for name in ("name", "schema")}}


def test_a_schema_is_not_forced_on_a_thought(server: ServerProcess) -> None:
    """If the prompt has opened a thought, a short answer is only thought. If not, it may follow the schema."""
    opened = {"chat_template_kwargs": {"opens_thought": True}}
    message = chat(server, response_format=CHAT_FORM, max_tokens=9, **opened)["choices"][0]["message"]
    assert message["reasoning_content"]
    assert not message["content"]
    biased = {"logit_bias": {str(first_token("<")): -100}}
    begun = {"messages": [*ASKED, {"role": "assistant", "content": ""}]}
    answers = [
        chat(server, response_format=CHAT_FORM, max_tokens=9, temperature=0, **opened, **biased, **fields)
        for fields in ({}, begun)
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    message = chat(server, response_format=CHAT_FORM, **biased)["choices"][0]["message"]
    assert set(json.loads(message["content"])) == {"brave"}
    answer = respond(server, input=ASKED, text={"format": FORM}, max_output_tokens=64, **biased)
    assert answer["output"][0]["content"][0]["text"] == message["content"]


def first_token(text: str) -> int:
    tokens: list[int] = open_checkpoint("zoo:llama-tiny").tokenizer().encode(text, add_special_tokens=False)
    return tokens[0]
