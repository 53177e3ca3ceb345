"""The parts of a cluster that know nothing of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.answer import Answer
from cluster.forwarding import Forwarded, Head, LocalCall, collect, read_prompt
from cluster.merging import merge
from cluster.scaling import replicas_for
from common.server.errors import ApiError, unavailable
from common.server.wire.format import event

REQUEST = Forwarded("POST", "/v1/completions", b"", ((b"content-type", b"application/json"),), b"{}")
STREAM = Head(200, ((b"content-type", b"text/event-stream; charset=utf-8"), (b"x-request-id", b"1")))
LOST = unavailable("lost", code="replica_lost", retry_after_s=1)


class Client:
    """Takes an answer, and reads its events."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def head(self) -> Message:
        return self.messages[0]

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def ended(self) -> bool:
        return [message.get("more_body") for message in self.messages[1:]].count(False) == 1

    @property
    def errors(self) -> list[dict[str, Any]]:
        events = [each for each in self.body.split(b"\n\n") if b'"error"' in each]
        return [orjson.loads(each.partition(b"data: ")[2]) for each in events]


def cut(path: str, parts: Sequence[Head | bytes], *, choices: int = 1, error: ApiError = LOST) -> Client:
    """A client whose replica was lost after it had sent so much."""

    async def run() -> Client:
        client = Client()
        answer = Answer(client.send, path)
        answer.choices = choices
        for part in parts:
            await answer.add(part)
        await answer.fail(error)
        return client

    return asyncio.run(run())


def done(index: int) -> bytes:
    return event({"choices": [{"index": index}], "finish_reason": "length"}, "done")


TOKEN = event({"choices": [{"index": 0}], "token": "event: done"}, "token")


# ---------------------------------------------------------------------- an answer that was cut off


def test_before_the_first_byte_the_client_gets_an_answer_like_any_other() -> None:
    client = cut("/v1/completions", [STREAM])
    assert client.head["status"] == 503
    assert (b"retry-after", b"1") in client.head["headers"]
    assert orjson.loads(client.body) == LOST.body()
    assert client.ended


def test_a_stream_ends_with_one_error_event() -> None:
    client = cut("/v1/completions", [STREAM, TOKEN, TOKEN])
    assert client.head["status"] == 200
    assert b"x-request-id" not in dict(client.head["headers"])  # Ray's proxy adds it
    assert client.body.startswith(TOKEN + TOKEN + b"event: error\ndata: ")
    assert client.errors == [LOST.body()]
    assert client.ended


def test_each_choice_that_has_not_ended_gets_its_error() -> None:
    client = cut("/v1/completions", [STREAM, TOKEN, done(1) + TOKEN], choices=3)
    assert [error["choices"][0]["index"] for error in client.errors] == [0, 2]
    assert client.ended


@pytest.mark.parametrize("path", ["/openai/v1/completions", "/v1/chat/completions"])
def test_openais_streams_end_as_they_always_do(path: str) -> None:
    client = cut(path, [STREAM, event({"choices": [{"index": 0}]})])
    assert client.errors == [LOST.body()]
    assert client.body.endswith(b"data: [DONE]\n\n")
    assert client.ended


@pytest.mark.parametrize(
    ("path", "last"), [("/v1/completions", done(0)), ("/v1/chat/completions", b"data: [DONE]\n\n")]
)
def test_what_was_complete_stays_so(path: str, last: bytes) -> None:
    client = cut(path, [STREAM, last])
    assert not client.errors
    assert client.body == last
    assert client.ended


def test_json_that_was_begun_is_not_made_worse() -> None:
    client = cut("/v1/completions", [Head(200, ((b"content-type", b"application/json"),)), b'{"id'])
    assert client.body == b'{"id'


# ---------------------------------------------------------------------- a call in this process


async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Sends what it got, then a byte for each turn of the loop, until its client leaves."""
    first = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send(
        {"type": "http.response.body", "body": scope["path"].encode() + first["body"], "more_body": True}
    )
    leaving = asyncio.ensure_future(receive())
    while not leaving.done():
        await send({"type": "http.response.body", "body": b".", "more_body": True})
        await asyncio.sleep(0)
    slow_app_saw.append(leaving.result()["type"])


slow_app_saw: list[str] = []


def test_an_answer_comes_as_it_is_made_and_leaving_early_is_heard() -> None:
    async def run() -> None:
        answer = LocalCall(slow_app, REQUEST).answer()
        parts = await anext(answer)
        while len(parts) < 20:
            parts += await anext(answer)
        assert parts[:2] == [Head(200, ((b"a", b"b"),)), b"/v1/completions{}"]
        assert set(parts[2:]) == {b"."}
        await answer.aclose()

    asyncio.run(run())
    assert slow_app_saw == ["http.disconnect"]


def test_an_app_that_raises_ends_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def failing(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"sorry"})
        raise RuntimeError("inside")

    assert asyncio.run(collect(failing, REQUEST)) == (Head(500, ()), b"sorry")
    assert "inside" in caplog.text


# ---------------------------------------------------------------------- what a router goes by


def keys_of(path: str = "/v1/completions", **fields: object) -> tuple[tuple[int, ...], int]:
    return read_prompt(path, orjson.dumps(fields))


LONG = "It was a dark and stormy night, and the rain fell in torrents. " * 4


def test_a_conversations_next_turn_has_the_keys_of_the_last() -> None:
    first = [{"role": "system", "content": LONG}, {"role": "user", "content": "Hello"}]
    turns = [first, [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": LONG}]]
    (before, _), (after, _) = (keys_of("/v1/chat/completions", messages=each) for each in turns)
    assert len(before) >= 4
    assert after[: len(before)] == before


def test_prompts_of_both_kinds_have_keys_and_salts_count() -> None:
    assert len(keys_of(prompt=LONG)[0]) == len(LONG) // 64
    assert keys_of(prompt=[LONG, "x"], n=3) == (keys_of(prompt=LONG)[0], 6)
    ids = list(range(100, 200))
    assert keys_of(prompt=ids)[0]
    assert keys_of(prompt=[ids, ids]) == (keys_of(prompt=ids)[0], 2)
    assert keys_of(prompt=LONG, cache_salt="mine")[0] != keys_of(prompt=LONG)[0]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"prompt":[]}', b'{"prompt":5}', b'{"n":"x","prompt":"a"}', b'{"prompt":[null]}'],
)
def test_what_is_no_request_is_the_replicas_to_refuse(body: bytes) -> None:
    keys, choices = read_prompt("/v1/completions", body)
    assert keys == ()
    assert choices == 1
    assert read_prompt("/tokenize", orjson.dumps({"prompt": LONG})) == ((), 1)


# ---------------------------------------------------------------------- sums


def test_telemetry_is_summed_and_each_replicas_own_is_there() -> None:
    one = {"phase": "p", "max_batch_size": 8, "max_seq_len": 64, "queue_room": 3, "next_step": 2}
    said = {
        "a": orjson.dumps(one | {"counters": {"steps": 2, "busy_s": 0.5}, "steps": [1, 2]}),
        "b": orjson.dumps(one | {"counters": {"steps": 5, "busy_s": 0.25}, "steps": []}),
    }
    merged = orjson.loads(merge("/telemetry", said))
    assert merged["counters"] == {"steps": 7, "busy_s": 0.75}
    assert (merged["queue_room"], merged["max_batch_size"], merged["max_seq_len"]) == (6, 16, 64)
    assert merged["replicas"]["a"]["steps"] == [1, 2]
    assert merged["next_step"] == 7  # no reader looks for another page
    assert orjson.loads(merge("/reset_prefix_cache", dict.fromkeys("ab", b'{"dropped_blocks":4}'))) == {
        "dropped_blocks": 8
    }


def test_metrics_have_a_family_once_and_a_sample_for_each_replica() -> None:
    page = b'# HELP vllm:x_total Text\n# TYPE vllm:x_total counter\nvllm:x_total{phase="p"} %d\n'
    merged = merge("/metrics", {"a": page % 1, "b": page % 2}).decode()
    assert merged.count("# TYPE vllm:x_total counter") == 1
    assert 'vllm:x_total{phase="p",replica="a"} 1.0' in merged
    assert 'vllm:x_total{phase="p",replica="b"} 2.0' in merged


# ---------------------------------------------------------------------- how many


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [([0.0, 0.0], 1), ([0.7], 1), ([0.71], 2), ([1.0, 1.0, 0.4], 4), ([0.3] * 4, 2), ([6], 9)],
)
def test_replicas_follow_the_sum_of_loads(loads: list[float], wanted: int) -> None:
    assert replicas_for(loads) == wanted
    shared = sum(loads) / wanted  # once the new ones have their part, nobody wants more
    assert replicas_for([shared] * wanted) == wanted
