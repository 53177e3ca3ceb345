"""Completions under `/openai/v1`, in exactly OpenAI's form, for strict tools."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.gate import SECRET
from tests.server.support import MESSAGES, PREFIXES, ServerProcess, assert_error

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
    assert [chunk["usage"]["completion_tokens"] for chunk in said] == [0, 1, 2, 3, 3], "the role is no token"
    for usage in (chunk["usage"] for chunk in said):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("path", ["/v1/completions", PATH, "/v1/chat/completions"])
def test_an_error_in_a_stream_says_whose_it_is(gated: ServerProcess, path: str) -> None:
    """If there are several choices, an error chunk names its choice.

    The cause is in the log, not in the answer.
    """
    gated.order("fail")
    for n in (1, 3):
        text = gated.ask(path, n=n, stream=True, max_tokens=4).text
        assert SECRET not in text
        lines = text.splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        errors = [chunk for chunk in map(json.loads, data) if "error" in chunk]
        assert [chunk["error"]["code"] for chunk in errors] == ["internal_error"] * n
        assert all(set(chunk["error"]) == {"message", "type", "param", "code"} for chunk in errors)
        assert n > 1 or set(errors[0]) == {"error"}
        named = sorted(choice["index"] for chunk in errors for choice in chunk.get("choices", []))
        assert named == ([] if n == 1 else [0, 1, 2])
    whole = gated.ask(path, stream=False)
    assert_error(whole, 500, None, "internal_error")
    assert SECRET not in whole.text
    assert SECRET in gated.log_text


# ---------------------------------------------------------------------- failures, as OpenAI's library sees them


@pytest.mark.parametrize("order", ["fail", "nan"])
def test_a_failed_request_is_not_sent_again(gated: ServerProcess, order: str) -> None:
    """The library sends a request up to three times, unless the answer has `x-should-retry: false`."""
    gated.order(order)
    with (
        openai.OpenAI(base_url=f"{gated.url}/v1", api_key="none") as client,
        pytest.raises(openai.InternalServerError) as failed,
    ):
        client.completions.create(model=gated.model, prompt="A failure of", max_tokens=2)
    assert failed.value.response.headers["x-should-retry"] == "false"
    assert gated.counters()["requests_added"] == 1


@pytest.mark.parametrize("chats", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_failure_in_a_stream_is_an_exception(gated: ServerProcess, prefix: str, chats: bool) -> None:
    fields: dict[str, Any] = {"model": gated.model, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    fields |= {"messages": MESSAGES} if chats else {"prompt": "Once upon a time"}
    with openai.OpenAI(base_url=gated.url + prefix, api_key="none", max_retries=0) as client:
        resource: Any = client.chat.completions if chats else client.completions
        stream = resource.create(**fields, stream=True)
        next(stream)
        gated.order("fail")
        with pytest.raises(openai.APIError, match="the server failed"):
            list(stream)
