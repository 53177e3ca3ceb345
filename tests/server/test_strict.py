"""Completions under `/openai/v1`, in exactly OpenAI's form, for strict tools."""

from __future__ import annotations

import pytest

from tests.support.servers import PREFIXES, ServerProcess

PATH = "/openai/v1/completions"
ROUTES = ("chat/completions", "responses")


# ---------------------------------------------------------------------- stream or JSON


@pytest.mark.parametrize("path", [*(f"{prefix}/{route}" for prefix in PREFIXES for route in ROUTES), PATH])
def test_nothing_streams_unless_asked_to(server: ServerProcess, path: str) -> None:
    """Only `/v1/completions`, the native route, streams by default."""
    for accept in ("*/*", "text/event-stream", "application/json"):
        for stream in ({}, {"stream": None}, {"stream": False}):
            answer = server.ask(path, headers={"Accept": accept}, **stream)
            assert answer.headers["content-type"] == "application/json"


def test_the_last_text_comes_with_the_finish_reason(server: ServerProcess) -> None:
    said = server.chunks(PATH, max_tokens=7, ignore_eos=True)
    assert [chunk["choices"][0]["finish_reason"] for chunk in said] == [None] * 6 + ["length"]
    assert said[-1]["choices"][0]["text"]
    text = "".join(chunk["choices"][0]["text"] for chunk in said)
    assert text == server.text(max_tokens=7, ignore_eos=True)
    for chunk in said:
        assert set(chunk) == {"id", "object", "created", "model", "system_fingerprint", "choices"}
        assert (chunk["object"], chunk["id"]) == ("text_completion", said[0]["id"])


def test_text_held_for_a_stop_string_comes_with_the_finish_reason(server: ServerProcess) -> None:
    whole = server.text(max_tokens=9, ignore_eos=True)
    said = server.chunks(PATH, max_tokens=9, ignore_eos=True, stop=whole[-3:] + "\u2603 never")
    assert said[-1]["choices"][0]["text"].endswith(whole[-3:])
    assert "".join(chunk["choices"][0]["text"] for chunk in said) == whole


# ---------------------------------------------------------------------- usage


def test_usage_only_when_asked_for(server: ServerProcess) -> None:
    for options in (None, {}, {"include_usage": False}, {"continuous_usage_stats": True}):
        said = server.chunks(PATH, max_tokens=3, stream_options=options)
        assert not any("usage" in chunk for chunk in said)
    fields = {"max_tokens": 3, "ignore_eos": True, "n": 2}
    *said, last = server.chunks(PATH, **fields, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in said] == [None] * 6
    assert (last["choices"], last["usage"]) == ([], server.complete(**fields)["usage"])


def test_continuous_usage_is_in_every_chunk(server: ServerProcess) -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    said = server.chunks(PATH, max_tokens=3, ignore_eos=True, stream_options=both)
    assert [chunk["usage"]["completion_tokens"] for chunk in said] == [1, 2, 3, 3]
    assert len({chunk["usage"]["prompt_tokens"] for chunk in said}) == 1
    path, messages = "/openai/v1/chat/completions", [{"role": "user", "content": "Hello!"}]
    said = server.chunks(path, messages=messages, max_tokens=3, ignore_eos=True, stream_options=both)
    assert [chunk["usage"]["completion_tokens"] for chunk in said] == [1, 1, 2, 3, 3], (
        "the role comes with a token"
    )
    for usage in (chunk["usage"] for chunk in said):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
