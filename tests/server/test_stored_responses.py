"""Stored responses: OpenAI's own library continues, retrieves and deletes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from common.server.api.response_items import ResponseStore, Stored
from common.server.errors import ApiError
from tests.server.test_responses import FOX
from tests.support.servers import MESSAGES, ServerProcess

ASKED, THEN = MESSAGES[1]["content"], "And then?"


def library(server: ServerProcess, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/openai/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with library(server) as client:
        yield client


def respond(client: openai.OpenAI, asked: Any, *, streams: bool = False, **fields: Any) -> Response:
    """Request a response of a few words, as JSON or from the last event of a stream."""
    fields = {"model": "zoo:llama-tiny", "input": asked, "temperature": 0} | fields
    extra: Any = {"structured_outputs": {"regex": "[a-z ]{9,20}x"}} if "tools" not in fields else {}
    if not streams:
        response: Response = client.responses.create(**fields, extra_body=extra)
        return response
    with client.responses.stream(**fields, extra_body=extra) as stream:
        return stream.get_final_response()


def same(a: Response, b: Response) -> bool:
    return (a.output_text, a.usage and a.usage.input_tokens) == (
        b.output_text,
        b.usage and b.usage.input_tokens,
    )


@pytest.mark.parametrize("streams", [False, True])
def test_a_second_and_a_third_turn(client: openai.OpenAI, streams: bool) -> None:
    first = respond(client, ASKED, streams=streams, instructions="Be brief.")
    second = respond(client, THEN, streams=streams, previous_response_id=first.id)
    third = respond(client, [{"role": "user", "content": THEN}], previous_response_id=second.id)
    user = [{"role": "user", "content": text} for text in (ASKED, THEN, THEN)]
    told = respond(client, [user[0], *first.output, user[1]])
    assert same(second, told), "instructions are not carried over"
    counted = client.responses.input_tokens.count(input=THEN, previous_response_id=first.id)
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens
    assert same(third, respond(client, [user[0], *first.output, user[1], *second.output, user[2]]))
    assert (second.previous_response_id, second.model_dump()["store"]) == (first.id, True)


def test_an_item_of_an_earlier_response_can_be_named(client: openai.OpenAI) -> None:
    first = respond(client, ASKED)
    asked: list[Any] = [{"role": "user", "content": ASKED}, {"role": "user", "content": THEN}]
    reference = {"type": "item_reference", "id": first.output[0].id}
    named = respond(client, [asked[0], reference, asked[1]], store=False)
    assert same(named, respond(client, THEN, previous_response_id=first.id))


def test_a_tool_loop_sends_only_what_is_new(client: openai.OpenAI) -> None:
    first = respond(client, ASKED, tools=[FOX], tool_choice="required")
    call = first.output[-1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "One fox."}
    second = respond(client, [result], previous_response_id=first.id, tools=[FOX], tool_choice="none")
    whole = [{"role": "user", "content": ASKED}, *first.output, result]
    assert same(second, respond(client, whole, tools=[FOX], tool_choice="none"))


def test_a_stored_response_is_retrieved_with_its_input_until_it_is_deleted(client: openai.OpenAI) -> None:
    first = respond(client, ASKED)
    second = respond(client, THEN, previous_response_id=first.id, streams=True)
    assert client.responses.retrieve(first.id) == first
    assert client.responses.retrieve(second.id).output_text == second.output_text
    items: list[Any] = list(client.responses.input_items.list(second.id, order="asc"))
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", ASKED),
        ("assistant", first.output_text),
        ("user", THEN),
    ]
    for limit in (1, 2, 3, 20):  # the library asks for further pages
        pages = client.responses.input_items.list(second.id, limit=limit)
        assert len(pages.data) == min(limit, 3)
        assert [item.id for item in pages] == [item.id for item in items[::-1]]
    twice = respond(client, [*first.output, *second.output, *first.output])  # items with one id
    listed: list[Any] = list(client.responses.input_items.list(twice.id, limit=1))
    texts = [item.content[0].text for item in listed]
    assert texts == [first.output_text, second.output_text, first.output_text]
    behind = client.responses.input_items.list(second.id, order="asc", after=items[2].id)
    assert (behind.data, behind.has_more) == ([], False)
    with (
        pytest.raises(openai.BadRequestError, match="stream: "),
        client.responses.stream(response_id=first.id),
    ):
        pass
    with pytest.raises(openai.BadRequestError, match="in_0"):
        client.responses.input_items.list(second.id, after="in_0")
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    told = [{"role": item.role, "content": item.content[0].text} for item in items]
    third = respond(client, THEN, previous_response_id=second.id)
    whole = respond(client, [*told, *second.output, {"role": "user", "content": THEN}])
    assert same(third, whole), "a response has its whole conversation"


REFERENCES: dict[str, tuple[Callable[[openai.OpenAI, Response], Any], str | None, str]] = {
    "retrieve": (lambda client, it: client.responses.retrieve(it.id), "response_id", "response_not_found"),
    "delete": (lambda client, it: client.responses.delete(it.id), "response_id", "response_not_found"),
    "input items": (
        lambda client, it: client.responses.input_items.list(it.id),
        "response_id",
        "response_not_found",
    ),
    "previous": (
        lambda client, it: respond(client, THEN, previous_response_id=it.id),
        "previous_response_id",
        "previous_response_not_found",
    ),
    "item": (
        lambda client, it: respond(client, [{"type": "item_reference", "id": it.output[0].id}]),
        "input",
        "item_not_found",
    ),
}


@pytest.mark.parametrize("use", REFERENCES)
def test_responses_that_are_not_found(server: ServerProcess, client: openai.OpenAI, use: str) -> None:
    refer, param, code = REFERENCES[use]
    stored, unstored = respond(client, ASKED), respond(client, ASKED, store=False)
    assert unstored.model_dump()["store"] is False
    item = stored.output[0].model_copy(update={"id": "msg_1_0"})
    unknown = stored.model_copy(update={"id": "resp_1", "output": [item]})
    for caller, response in ((client, unknown), (client, unstored), (library(server, "another"), stored)):
        with pytest.raises(openai.NotFoundError) as raised:
            refer(caller, response)
        assert (raised.value.param, raised.value.code) == (param, code)
    refer(client, stored)


def test_a_server_may_store_none(phase: str) -> None:
    with ServerProcess(phase, "--max-stored-responses", "0") as server, library(server) as client:
        first = respond(client, ASKED)
        assert first.model_dump()["store"] is False
        for refer, _, code in REFERENCES.values():
            with pytest.raises(openai.NotFoundError) as raised:
                refer(client, first)
            assert raised.value.code == code
        server.assert_serves()


# ---------------------------------------------------------------------- bounds


def entry(size: int, owner: bytes = b"a") -> Stored:
    return Stored(owner, b"[]", b"x" * (size - 2))


def test_the_least_recently_used_goes_first_by_number_and_by_bytes() -> None:
    store = ResponseStore(3, max_bytes=100)
    for name in "abc":
        store.put(name, entry(20))
    store.get(b"a", "a")
    store.put("d", entry(20))
    kept = [name for name in "abcd" if store.find(b"a", name)]
    assert kept == ["a", "c", "d"]
    store.put("e", entry(80))
    assert [name for name in "acde" if store.find(b"a", name)] == ["d", "e"]
    store.remove(b"a", "e")
    store.put("f", entry(80))
    assert [name for name in "def" if store.find(b"a", name)] == ["d", "f"]
    store.put("g", entry(101))
    assert not any(store.find(b"a", name) for name in "dfg"), "what is larger than all is not kept"
    with pytest.raises(ApiError):
        store.remove(b"b", "a")
