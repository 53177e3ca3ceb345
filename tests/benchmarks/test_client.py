"""Reading streams of our servers, and of any other OpenAI-compatible server."""

from __future__ import annotations

import json

import pytest

from benchmarks.client import AnswerReader, Endpoint
from benchmarks.events import EventParser
from tests.benchmarks.conftest import planned

NAMED = (
    b'event: token\ndata: {"choices":[{"text":"Hi"}],"token":"Hi"}\n\n'
    b'event: token\ndata: {"choices":[{"text":""}],"token":""}\n\n'
    b'event: done\ndata: {"choices":[{"text":"","finish_reason":"stop"}],"finish_reason":"eos",'
    b'"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
)
PLAIN = (
    b'data: {"choices":[{"text":"Hi","finish_reason":null}]}\r\n\r\n'
    b": ping\r\n\r\n"
    b'data: {"choices":[{"text":" you","finish_reason":"length"}]}\r\n\r\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\r\n\r\n'
    b"data: [DONE]\r\n\r\n"
)


def test_events_are_the_same_however_the_bytes_are_cut() -> None:
    for stream in (NAMED, PLAIN):
        whole = EventParser().feed(stream)
        assert len(whole) == stream.count(b"data:")
        for cut in range(len(stream)):
            parser = EventParser()
            assert parser.feed(stream[:cut]) + parser.feed(stream[cut:]) == whole
        parser = EventParser()
        assert [event for at in range(len(stream)) for event in parser.feed(stream[at : at + 1])] == whole


def test_several_data_lines_are_one_event() -> None:
    assert EventParser().feed(b"event: x\ndata: a\ndata: b\n\n") == [(b"x", b"a\nb")]


@pytest.mark.parametrize(("stream", "reason"), [(NAMED, "eos"), (PLAIN, "length")], ids=["named", "plain"])
def test_an_answer_is_read_to_its_end(stream: bytes, reason: str) -> None:
    reader = AnswerReader()
    assert reader.feed(stream) == 2  # a token whose text is held back is a token
    assert (reader.ended, reader.error, reader.finish_reason) == (True, None, reason)
    assert reader.usage == {"prompt_tokens": 3, "completion_tokens": 2}


def test_a_chunk_that_only_ends_brings_no_token() -> None:
    reader = AnswerReader()
    assert reader.feed(b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n') == 0
    assert not reader.ended  # only [DONE] is the end


def test_tokens_that_are_named_count_whatever_their_text() -> None:
    """Token ids count even if their chunk has no text or a finish reason. A chunk may have two of them."""
    reader = AnswerReader()
    assert reader.feed(b'data: {"choices":[{"text":"Hi","token_ids":[4,5],"finish_reason":null}]}\n\n') == 2
    assert reader.feed(b'data: {"choices":[{"text":"","token_ids":[6],"finish_reason":"length"}]}\n\n') == 1
    assert reader.feed(b'data: {"choices":[{"text":"","token_ids":null,"finish_reason":"length"}]}\n\n') == 0
    assert reader.continued([1]) == [1, 4, 5, 6]


def test_usage_of_null_does_not_wipe_usage_that_came() -> None:
    """With include_usage, every chunk but one has `"usage": null`."""
    reader = AnswerReader()
    reader.feed(b'data: {"choices":[],"usage":{"completion_tokens":5}}\n\n')
    reader.feed(b'data: {"choices":[],"usage":null}\n\ndata: [DONE]\n\n')
    assert reader.usage == {"completion_tokens": 5}


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (b'event: error\ndata: {"error":{"message":"a\\nb","type":"x"}}\n\n', "a b"),
        (b'data: {"error":{"message":"no"}}\n\n', "no"),
        (b'data: {"error":"no"}\n\n', "no"),
        (b"data: 17\n\n", "an event that is no object: 17"),
    ],
)
def test_errors_in_a_stream(event: bytes, said: str) -> None:
    reader = AnswerReader()
    assert reader.feed(event) == 0
    assert reader.error == said
    assert not reader.ended


def test_the_body_asks_for_exactly_the_planned_tokens() -> None:
    body = json.loads(Endpoint("http://x", "m").body(planned(4, tokens=9)))
    assert body == {
        "model": "m",
        "prompt": [4, 1, 2],
        "max_tokens": 9,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert "ignore_eos" not in json.loads(Endpoint("http://x", "m", ignore_eos=False).body(planned(4)))


def test_a_key_is_sent_only_if_there_is_one() -> None:
    assert Endpoint("http://x", "m", api_key="k").headers["Authorization"] == "Bearer k"
    assert "Authorization" not in Endpoint("http://x", "m").headers
