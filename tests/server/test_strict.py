"""`/openai/v1`: what strict tools ask of a server, through the real client and byte by byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.support import ServerProcess, assert_error, eventually

PROMPT = "Once upon a time"


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/openai/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def the_next_request_is_served(server: ServerProcess) -> Iterator[None]:
    yield
    assert server.complete(max_tokens=1)["usage"]["completion_tokens"] == 1


def post(server: ServerProcess, **fields: Any) -> httpx.Response:
    return server.client.post("/openai/v1/completions", json=server.body(**fields))


def chunks(server: ServerProcess, **fields: Any) -> list[dict[str, Any]]:
    """A stream's chunks; every line of it is data, and the last one says so."""
    response = post(server, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# ---------------------------------------------------------------------- stream or JSON


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream", "application/json"])
@pytest.mark.parametrize("stream", [{}, {"stream": None}, {"stream": False}])
def test_nothing_streams_unless_asked_to(
    server: ServerProcess, accept: str, stream: dict[str, bool | None]
) -> None:
    body = server.body(max_tokens=2, **stream)
    answer = server.client.post("/openai/v1/completions", json=body, headers={"Accept": accept}).json()
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["choices"] == server.complete(max_tokens=2)["choices"]


def test_the_last_text_comes_with_the_finish_reason(server: ServerProcess) -> None:
    said = chunks(server, max_tokens=7, ignore_eos=True)
    assert [chunk["choices"][0]["finish_reason"] for chunk in said] == [None] * 6 + ["length"]
    assert said[-1]["choices"][0]["text"]
    text = "".join(chunk["choices"][0]["text"] for chunk in said)
    assert text == server.complete(max_tokens=7, ignore_eos=True)["choices"][0]["text"]
    for chunk in said:
        assert set(chunk) == {"id", "object", "created", "model", "choices"}
        assert (chunk["object"], chunk["id"]) == ("text_completion", said[0]["id"])


def test_what_was_held_back_for_a_stop_string_comes_with_the_finish_reason(server: ServerProcess) -> None:
    whole = server.complete(max_tokens=9, ignore_eos=True)["choices"][0]["text"]
    said = chunks(server, max_tokens=9, ignore_eos=True, stop=whole[-3:] + "\u2603 never")
    assert said[-1]["choices"][0]["text"].endswith(whole[-3:])
    assert "".join(chunk["choices"][0]["text"] for chunk in said) == whole


# ---------------------------------------------------------------------- usage


def test_usage_only_when_asked_for(server: ServerProcess) -> None:
    for options in (None, {}, {"include_usage": False}, {"continuous_usage_stats": True}):
        said = chunks(server, max_tokens=3, stream_options=options)
        assert not any("usage" in chunk for chunk in said)
    *said, last = chunks(server, max_tokens=3, ignore_eos=True, n=2, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in said] == [None] * 6
    assert last["choices"] == []
    assert last["usage"] == server.complete(max_tokens=3, ignore_eos=True, n=2)["usage"]


def test_continuous_usage_is_in_every_chunk(server: ServerProcess) -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    said = chunks(server, max_tokens=3, ignore_eos=True, stream_options=both)
    assert [chunk["usage"]["completion_tokens"] for chunk in said] == [1, 2, 3, 3]
    assert len({chunk["usage"]["prompt_tokens"] for chunk in said}) == 1


@pytest.mark.parametrize("stream", [{}, {"stream": False}])
def test_stream_options_without_a_stream_are_refused(server: ServerProcess, stream: dict[str, bool]) -> None:
    response = post(server, stream_options={"include_usage": True}, **stream)
    assert_error(response, 400, "stream_options", "invalid_value")


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "word " * 5000}, "prompt"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
def test_refusals_are_400(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    server.begin_test()
    assert_error(post(server, **fields), 400, param)
    eventually(lambda: "refused: 400 " in server.log_text)


def test_the_client_raises_what_openai_means(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=server.model, prompt=PROMPT, max_tokens=100_000)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="another", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


# ---------------------------------------------------------------------- the real client


def test_models(client: openai.OpenAI, server: ServerProcess) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model


def test_json_and_stream_agree(client: openai.OpenAI, server: ServerProcess) -> None:
    whole = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=12, temperature=0)
    *stream, last = client.completions.create(
        model=server.model,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert stream[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage
    assert last.usage is not None


def test_choices_of_one_seed_differ_and_equal_prompts_agree(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    answer = client.completions.create(
        model=server.model, prompt=PROMPT, n=4, seed=3, temperature=1.5, max_tokens=40
    )
    assert len({choice.text for choice in answer.choices}) == 4
    twice = client.completions.create(
        model=server.model, prompt=[PROMPT, PROMPT], temperature=0, max_tokens=20
    )
    assert twice.choices[0].text == twice.choices[1].text


@pytest.mark.parametrize("count", [0, 5])
def test_logprobs(client: openai.OpenAI, server: ServerProcess, count: int) -> None:
    fields: dict[str, Any] = {"model": server.model, "prompt": PROMPT, "max_tokens": 6, "logprobs": count}
    fields |= {"temperature": 2.0, "seed": 1, "extra_body": {"ignore_eos": True}}
    logprobs = client.completions.create(**fields).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert all(max(count, 1) <= len(top) <= count + 1 for top in logprobs.top_logprobs)
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**fields, stream=True)]
    assert [part.tokens[0] for part in streamed if part and part.tokens] == logprobs.tokens
    assert [part.text_offset[0] for part in streamed if part and part.text_offset] == logprobs.text_offset


@pytest.mark.parametrize("path", ["/v1/completions", "/openai/v1/completions", "/v1/chat/completions"])
def test_an_error_in_a_stream_says_whose_it_is(gated: ServerProcess, path: str) -> None:
    """The error chunk of several choices names its choice; with one choice there is nothing to name."""
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Whose?"}]} if "chat" in path else {"prompt": "Whose?"}
    )
    prompt |= {"model": gated.model}
    gated.order("fail")
    for n in (1, 3):
        body = prompt | {"n": n, "stream": True, "max_tokens": 4}
        lines = gated.client.post(path, json=body).text.splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        errors = [chunk for chunk in map(json.loads, data) if "error" in chunk]
        assert len(errors) == n
        assert all(chunk["error"]["code"] == "internal_error" for chunk in errors)
        named = sorted(choice["index"] for chunk in errors for choice in chunk.get("choices", []))
        assert named == ([] if n == 1 else [0, 1, 2])
    gated.order("heal")
    assert gated.client.post(path, json=prompt | {"max_tokens": 1}).status_code == 200


def test_a_failure_in_a_stream_is_an_exception(gated: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{gated.url}/openai/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model=gated.model,
            prompt=PROMPT,
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        gated.order("fail")
        with pytest.raises(openai.APIError, match="the server failed"):
            list(stream)
        gated.order("heal")
        assert client.completions.create(model=gated.model, prompt=PROMPT, max_tokens=2).choices[0].text
