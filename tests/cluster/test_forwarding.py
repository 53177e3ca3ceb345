"""What the router reads in a request: the keys of its prompt, and the replica that has a stored response."""

from __future__ import annotations

import orjson
import pytest

from cluster.forwarding import read_holder, read_keys


def keys_of(path: str = "/v1/completions", **fields: object) -> tuple[int, ...]:
    return read_keys(path, orjson.dumps(fields))


LONG = "It was a dark and stormy night, and the rain fell in torrents. " * 4


def test_a_conversations_next_turn_has_the_keys_of_the_last() -> None:
    first = [{"role": "system", "content": LONG}, {"role": "user", "content": "Hello"}]
    turns = [first, [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": LONG}]]
    before, after = (keys_of("/v1/chat/completions", messages=each) for each in turns)
    assert len(before) >= 4
    assert after[: len(before)] == before


def test_a_list_of_items_has_the_keys_of_the_last_turn() -> None:
    first = {"instructions": LONG, "input": [{"role": "user", "content": "Hello"}]}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}
    second = first | {"input": [*first["input"], answer, {"role": "user", "content": LONG}]}
    before, after = (keys_of("/v1/responses", **each) for each in (first, second))
    assert len(before) >= 4
    assert after[: len(before)] == before
    assert keys_of("/v1/responses", input=LONG) != keys_of("/v1/responses", input=LONG, instructions="Hi")
    assert keys_of("/v1/responses", **first, cache_salt="mine") != before


def test_prompts_of_both_kinds_have_keys_and_salts_count() -> None:
    assert len(keys_of(prompt=LONG)) == len(LONG) // 64
    assert keys_of(prompt=[LONG, "x"], n=3) == keys_of(prompt=LONG)
    ids = list(range(100, 200))
    assert keys_of(prompt=ids)
    assert keys_of(prompt=[ids, ids]) == keys_of(prompt=ids)
    assert keys_of(prompt=LONG, cache_salt="mine") != keys_of(prompt=LONG)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"prompt":[]}', b'{"prompt":5}', b'{"n":"x","prompt":"a"}', b'{"prompt":[null]}'],
)
def test_what_is_no_request_is_the_replicas_to_refuse(body: bytes) -> None:
    assert read_keys("/v1/completions", body) == ()
    assert read_keys("/tokenize", orjson.dumps({"prompt": LONG})) == ()


def test_messages_of_anthropics_api_have_the_keys_of_the_last_turn() -> None:
    first = {"system": [{"type": "text", "text": LONG}], "messages": [{"role": "user", "content": "Hello"}]}
    second = first | {"messages": [*first["messages"], {"role": "assistant", "content": LONG}]}
    before, after = (keys_of("/v1/messages", **each) for each in (first, second))
    assert len(before) >= 4
    assert after[: len(before)] == before


@pytest.mark.parametrize(
    ("path", "body", "holder"),
    [
        ("/v1/responses/resp_ab_12", {}, "ab"),
        ("/openai/v1/responses/resp_ab_12/input_items", {}, "ab"),
        ("/v1/responses", {"previous_response_id": "resp_ab_12", "input": "Hi"}, "ab"),
        ("/v1/responses/input_tokens", {"previous_response_id": "resp_ab_12", "input": "Hi"}, "ab"),
        (
            "/v1/responses",
            {"input": [{"role": "user"}, {"type": "item_reference", "id": "msg_ab_12_0"}]},
            "ab",
        ),
        ("/v1/responses", {"input": "item_reference"}, ""),
        ("/v1/responses", {"input": [5, "previous_response_id"]}, ""),
        ("/v1/responses", ["previous_response_id"], ""),
        ("/v1/responses", {"previous_response_id": 5, "input": "Hi"}, ""),
        ("/v1/responses/resp_1", {}, ""),
        ("/v1/chat/completions", {"messages": []}, ""),
    ],
)
def test_a_stored_responses_id_names_its_replica(path: str, body: object, holder: str) -> None:
    assert read_holder(path, orjson.dumps(body)) == holder
