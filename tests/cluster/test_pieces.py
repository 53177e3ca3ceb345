"""The parts of a cluster that do not use Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.answer import Answer
from cluster.forwarding import (
    Ended,
    Forwarded,
    Head,
    LocalCall,
    Part,
    Whole,
    collect,
    read_holder,
    read_keys,
)
from cluster.merging import health, merge
from cluster.scaling import replicas_for
from common.engine.engine import Engine
from common.server.api.shapes import event
from common.server.app import create_app
from common.server.errors import ApiError, unavailable
from common.startup.phases import find_phase

REQUEST = Forwarded("POST", "/v1/completions", b"", ((b"content-type", b"application/json"),), b"{}")
HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"x-request-id", b"1"))
LOST = unavailable("lost", code="replica_lost", retry_after_s=1)


class Client:
    """Records an answer's messages."""

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


def cut(path: str, parts: Sequence[Part], *, error: ApiError = LOST) -> Client:
    """Return a client whose replica was lost after it had sent `parts`."""

    async def run() -> Client:
        client = Client()
        answer = Answer(client.send, path)
        for part in parts:
            await answer.add(part)
        await answer.fail(error)
        return client

    return asyncio.run(run())


TOKEN = event({"choices": [{"index": 0}], "token": "event: done"}, "token")
DONE = event({"choices": [{"index": 0}], "finish_reason": "length"}, "done")
ENDS = (
    event(LOST.body() | {"choices": [{"index": 0}]}, "error"),
    event(LOST.body() | {"choices": [{"index": 1}]}),
)
LAST = b"data: [DONE]\n\n"
STREAM = Head(200, HEADERS, (*ENDS, LAST))


# ---------------------------------------------------------------------- an answer's end


def test_an_answer_of_a_known_length_ends_with_its_last_byte() -> None:
    """So the client may send the next request on the same connection at once."""

    async def run() -> None:
        client = Client()
        answer = Answer(client.send, "/v1/models")
        await answer.add(Head(200, ((b"content-type", b"application/json"), (b"content-length", b"4"))))
        await answer.add(b"[1")
        assert not client.ended
        await answer.add(b"2]")
        assert client.ended
        await answer.finish()
        assert client.ended, "once"
        assert client.body == b"[12]"

    asyncio.run(run())


# ---------------------------------------------------------------------- an answer that was cut off


def test_before_the_first_byte_the_client_gets_an_answer_like_any_other() -> None:
    client = cut("/v1/completions", [STREAM])
    assert client.head["status"] == 503
    assert (b"retry-after", b"1") in client.head["headers"]
    assert orjson.loads(client.body) == LOST.body()
    assert client.ended


def test_a_stream_ends_with_what_its_replica_wrote_for_that() -> None:
    client = cut("/v1/completions", [STREAM, TOKEN, TOKEN])
    assert client.head["status"] == 200
    assert b"x-request-id" not in dict(client.head["headers"])  # `RequestIds` adds it, or Serve's proxy
    assert client.body == TOKEN + TOKEN + b"".join(ENDS) + LAST
    assert client.ended


def test_what_has_ended_is_not_ended_again() -> None:
    client = cut("/v1/completions", [STREAM, TOKEN, DONE, Ended(frozenset({0})), TOKEN])
    assert client.body == TOKEN + DONE + TOKEN + ENDS[1] + LAST
    complete = cut("/v1/completions", [STREAM, DONE, LAST, Ended(frozenset({0, 1, 2}))])
    assert complete.body == DONE + LAST
    assert client.ended
    assert complete.ended


def test_json_that_was_begun_is_not_made_worse() -> None:
    client = cut("/v1/completions", [Head(200, ((b"content-type", b"application/json"),)), b'{"id'])
    assert client.body == b'{"id'
    assert client.ended


# ---------------------------------------------------------------------- streams of the real app, cut anywhere

PROMPTS = [f"Once upon a time there was a number {i}, who" for i in range(32)]
MANY = {
    "prompt": PROMPTS,
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 20,
}
TALKATIVE = MANY | {"prompt": PROMPTS[0], "n": 16, "logprobs": 20}
CHAT = {
    "messages": [{"role": "user", "content": "Hello"}],
    "n": 16,
    "logprobs": True,
    "top_logprobs": 20,
    "max_tokens": 6,
    "stream": True,
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    package = find_phase("8")
    return package.build_engine(
        package.Config(model="zoo:llama-tiny", device="cpu", dtype="float32", max_batch_size=32)
    )


def parts_of(engine: Engine, path: str, fields: dict[str, Any]) -> list[Part]:
    """Return all parts of an answer that a replica sends, in order."""
    app = create_app(engine)
    body = orjson.dumps({"model": "zoo:llama-tiny", **fields})
    request = Forwarded("POST", path, b"", ((b"content-type", b"application/json"),), body)

    async def run() -> list[Part]:
        async with app.router.lifespan_context(app):
            return [part async for ready in LocalCall(app, request).answer() for part in ready]

    return asyncio.run(run())


def test_a_long_stream_goes_to_the_front_in_whole_events_wherever_it_is_cut(engine: Engine) -> None:
    for path, fields, choices in (
        ("/v1/completions", MANY, 32),
        ("/v1/completions", TALKATIVE, 16),
        ("/openai/v1/completions", TALKATIVE, 16),
        ("/v1/chat/completions", CHAT, 16),
    ):
        head, *parts = parts_of(engine, path, fields)
        assert isinstance(head, Head)
        assert head.status == 200
        for end in range(1, len(parts) + 1):
            if end == len(parts) or not isinstance(
                parts[end], Ended
            ):  # `Ended` always comes with the bytes before it
                ends = Ends.of(cut(path, [head, *parts[:end]]).body)
                assert sorted(ends.choices) == list(range(choices))
                assert ends.closed == (path != "/v1/completions")
        assert not Ends.of(cut(path, [head, *parts]).body).failed


def test_a_response_cut_anywhere_ends_failed_with_a_number_after_all(engine: Engine) -> None:
    fields = {"input": "Hello", "max_output_tokens": 6, "ignore_eos": True, "stream": True}
    head, *parts = parts_of(engine, "/v1/responses", fields)
    assert isinstance(head, Head)
    for end in range(1, len(parts) + 1):
        if end < len(parts) and isinstance(parts[end], Ended):  # always comes with the bytes before it
            continue
        body = cut("/v1/responses", [head, *parts[:end]]).body
        events = [orjson.loads(line.removeprefix(b"data: ")) for line in body.splitlines()[1::3]]
        names, numbers = ([event[name] for event in events] for name in ("type", "sequence_number"))
        assert numbers == sorted(set(numbers))
        assert names[:2] == ["response.created", "response.in_progress"]
        if "response.incomplete" in names:
            assert names[-1] == "response.incomplete"
            continue
        assert names[-2:] == ["error", "response.failed"]
        assert (events[-2]["code"], events[-1]["response"]["status"]) == ("replica_lost", "failed")
        assert events[-1]["response"]["id"] == events[0]["response"]["id"]
    assert "response.incomplete" in names


@dataclass
class Ends:
    """How a stream ended for its client.

    Attributes:
        choices: the index of each choice that ended, with a finish reason or an error.
        failed: the number of errors.
        closed: whether the stream ended with `[DONE]`.
    """

    choices: list[int]
    failed: int
    closed: bool

    @classmethod
    def of(cls, body: bytes) -> Ends:
        assert body.endswith(b"\n\n")
        choices, failed, closed = [], 0, 0
        for text in body.removesuffix(b"\n\n").split(b"\n\n"):
            line = text.rpartition(b"\n")[2].removeprefix(b"data: ")
            closed += line == b"[DONE]"
            if line == b"[DONE]":
                continue
            data = orjson.loads(line)
            failed += "error" in data
            if (
                "error" in data and "choices" not in data
            ):  # a plain chunk does not name the choice of its error
                choices.append(next(i for i in range(32) if i not in choices))
            choices += [
                each["index"]
                for each in data.get("choices", ())
                if "error" in data or each.get("finish_reason")
            ]
        assert closed <= 1
        return cls(choices, failed, bool(closed))


# ---------------------------------------------------------------------- a call in this process


async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Send the request's path and body back, then a byte in each turn of the event loop until the client leaves."""
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


def test_an_answers_id_contains_the_requests_id_that_the_front_made_up(engine: Engine) -> None:
    app = create_app(engine)
    body = orjson.dumps({"prompt": "Once", "max_tokens": 1, "stream": False})
    headers = ((b"content-type", b"application/json"), (b"x-request-id", b"0123abcd"))

    async def run() -> list[str]:
        async with app.router.lifespan_context(app):
            requests = (
                Forwarded("POST", "/v1/completions", b"", headers, body, named) for named in (False, True)
            )
            return [orjson.loads((await collect(app, request))[1])["id"] for request in requests]

    made_up, chosen = asyncio.run(run())
    assert made_up == "cmpl-0123abcd"
    assert "0123abcd" not in chosen, "a client may choose the same id for many requests"


# ---------------------------------------------------------------------- keys of prefixes


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


# ---------------------------------------------------------------------- sums


def reply(body: bytes, status: int = 200) -> Whole:
    return Head(status, ((b"content-type", b"x"), (b"content-length", b"%d" % len(body)))), body


def merged(path: str, bodies: Mapping[str, bytes]) -> bytes:
    head, body = merge(path, {name: reply(each) for name, each in bodies.items()})
    assert head == Head(200, ((b"content-type", b"x"), (b"content-length", b"%d" % len(body))))
    return body


def test_telemetry_is_summed_and_each_replicas_own_is_there() -> None:
    one = {"phase": "p", "max_batch_size": 8, "max_seq_len": 64, "queue_room": 3, "next_step": 2}
    bodies = {
        "a": orjson.dumps(one | {"counters": {"steps": 2, "busy_s": 0.5}, "steps": [1, 2]}),
        "b": orjson.dumps(one | {"counters": {"steps": 5, "busy_s": 0.25}, "steps": []}),
    }
    said = orjson.loads(merged("/telemetry", bodies))
    assert said["counters"] == {"steps": 7, "busy_s": 0.75}
    assert (said["queue_room"], said["max_batch_size"], said["max_seq_len"]) == (6, 16, 64)
    assert said["replicas"]["a"]["steps"] == [1, 2]
    assert said["next_step"] == 7  # the end, so readers ask for no other page
    assert orjson.loads(merged("/reset_prefix_cache", dict.fromkeys("ab", b'{"dropped_blocks":4}'))) == {
        "dropped_blocks": 8
    }


def test_metrics_have_a_family_once_and_a_sample_for_each_replica() -> None:
    page = b'# HELP vllm:x_total Text\n# TYPE vllm:x_total counter\nvllm:x_total{phase="p"} %d\n'
    said = merged("/metrics", {"a": page % 1, "b": page % 2}).decode()
    assert said.count("# TYPE vllm:x_total counter") == 1
    assert 'vllm:x_total{phase="p",replica="a"} 1.0' in said
    assert 'vllm:x_total{phase="p",replica="b"} 2.0' in said


DEAD = reply(orjson.dumps(unavailable("dead", code="engine_dead", retry_after_s=30).body()), 503)


def test_a_dead_replica_is_left_out_of_a_sum() -> None:
    well = reply(b'{"dropped_blocks":4}')
    _, body = merge("/reset_prefix_cache", {"a": DEAD, "b": well, "c": well})
    assert orjson.loads(body) == {"dropped_blocks": 8}
    assert merge("/reset_prefix_cache", {"a": DEAD, "b": DEAD}) == DEAD
    failed = reply(b"failed", 500)
    assert orjson.loads(merge("/reset_prefix_cache", {"a": failed, "b": well})[1]) == {"dropped_blocks": 4}
    wrong = reply(b"wrong", 400)
    assert merge("/reset_prefix_cache", {"a": DEAD, "b": wrong}) == wrong


@pytest.mark.parametrize(
    ("replies", "known", "draining", "status", "replicas"),
    [
        ({"a": "ok", "b": "ok"}, "ab", False, "ok", {"a": "ok", "b": "ok"}),
        ({"a": "ok", "b": "ok"}, "ab", True, "draining", {"a": "ok", "b": "ok"}),
        (
            {"a": "ok", "b": "draining", "c": "ok"},
            "abc",
            False,
            "ok",
            {"a": "ok", "b": "draining", "c": "ok"},
        ),
        ({"a": "ok", "b": None}, "ab", False, "degraded", {"a": "ok", "b": "engine_dead"}),
        (
            {"a": "ok", "b": None, "c": "ok"},
            "ab",
            False,
            "degraded",
            {"a": "ok", "b": "engine_dead", "c": "ok"},
        ),
        ({"a": "ok"}, "ab", False, "degraded", {"a": "ok", "b": "lost"}),
        ({"a": "ok"}, "a", False, "degraded", {"a": "ok"}),  # Serve is starting the second replica
    ],
)
def test_a_cluster_is_well_enough_while_a_replica_lives(
    replies: dict[str, str | None], known: str, draining: bool, status: str, replicas: dict[str, str]
) -> None:
    answers = {
        name: DEAD if state is None else reply(orjson.dumps({"status": state, "phase": "p"}))
        for name, state in replies.items()
    }
    head, body = health(answers, wanted=2, known=known, draining=draining)
    assert head.status == 200
    assert orjson.loads(body) == {"status": status, "phase": "p", "replicas": replicas}


def test_a_cluster_whose_engines_are_all_dead_is_dead() -> None:
    assert health({"a": DEAD, "b": DEAD}, wanted=2, known="ab", draining=False) == DEAD


# ---------------------------------------------------------------------- number of replicas


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [([0.0, 0.0], 1), ([0.7], 1), ([0.71], 2), ([1.0, 1.0, 0.4], 4), ([0.3] * 4, 2), ([6], 9)],
)
def test_replicas_follow_the_sum_of_loads(loads: list[float], wanted: int) -> None:
    assert replicas_for(loads) == wanted
    shared = sum(loads) / wanted  # with the load spread evenly, the number stays
    assert replicas_for([shared] * wanted) == wanted
