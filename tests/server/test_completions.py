"""Successful answers of `POST /v1/completions`, over a real socket."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.conftest import OwnPrompt
from tests.support.servers import (
    ServerProcess,
    answer_of,
    assert_error,
    read_events,
    texts,
)

GREEDY = {"prompt": "The lantern was in the"}
SEEDED = GREEDY | {"temperature": 1.2, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "seed": 7}
#: A request whose answer has characters of several tokens. No event may have half a character.
SCRIPTS = {"prompt": "猫 🐈‍⬛ naïve ß", "temperature": 3.0, "seed": 2, "ignore_eos": True}


# ---------------------------------------------------------------------- stream


def test_stream_has_a_named_event_for_each_token_and_one_that_ends_it(server: ServerProcess) -> None:
    events = server.events(max_tokens=5, ignore_eos=True)
    assert [name for name, _ in events] == ["token"] * 5 + ["done"]
    for _, data in events:
        assert data["object"] == "text_completion"
        assert data["model"] == server.model
        assert data["id"] == events[0][1]["id"]
        assert data["id"].startswith("cmpl-")
        assert data["created"] == events[0][1]["created"]
    for _, data in events[:-1]:
        (choice,) = data["choices"]
        assert choice == {"index": 0, "text": data["token"], "logprobs": None, "finish_reason": None}
        assert isinstance(data["token_id"], int)
        assert "usage" not in data
    done = events[-1][1]
    assert done["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]
    assert done["finish_reason"] == "length"
    usage = done["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


def test_stream_is_lf_only_and_has_no_ping(server: ServerProcess) -> None:
    response = server.ask("/v1/completions", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    assert b"\r" not in response.content
    lines = response.content.decode().split("\n")
    assert all(line.startswith(("event: ", "data: ")) for line in lines if line)
    assert response.content.endswith(b"\n\n")


@pytest.mark.parametrize("fields", [GREEDY, SEEDED, SCRIPTS], ids=["greedy", "seeded", "many scripts"])
def test_joined_stream_equals_the_json_answer(server: ServerProcess, fields: dict[str, Any]) -> None:
    answer = server.complete(
        **fields, max_tokens=60, cache_salt="json"
    )  # with two salts, neither request hits the other's prompt
    events = server.events(**fields, max_tokens=60, cache_salt="stream")
    assert texts(events)[0] == answer["choices"][0]["text"]
    done = events[-1][1]
    assert done["usage"] == answer["usage"]
    assert done["finish_reason"] == answer["finish_reason"]
    assert done["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]


def test_json_answer_has_openais_shape(server: ServerProcess) -> None:
    answer = server.complete(max_tokens=3, ignore_eos=True)
    assert set(answer) == {
        "id",
        "object",
        "created",
        "model",
        "system_fingerprint",
        "choices",
        "finish_reason",
        "usage",
    }
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert (choice["logprobs"], choice["finish_reason"], answer["finish_reason"]) == (
        None,
        "length",
        "length",
    )


# ---------------------------------------------------------------------- stream or JSON


@pytest.mark.parametrize(
    ("accept", "stream", "streams"),
    [
        ("application/json; charset=utf-8", ..., False),
        ("application/json", None, False),
        ("*/*", None, True),
        ("text/event-stream", None, True),
        ("", None, True),
        ("application/json", True, True),
        ("text/event-stream", False, False),
        ("*/*", False, False),
    ],
)
def test_an_explicit_stream_wins_over_accept(
    server: ServerProcess, accept: str, stream: Any, streams: bool
) -> None:
    body = server.body(max_tokens=1) | ({} if stream is ... else {"stream": stream})
    response = server.client.post("/v1/completions", json=body, headers={"Accept": accept})
    assert response.status_code == 200
    kind = "text/event-stream" if streams else "application/json"
    assert response.headers["content-type"].startswith(kind)


def test_the_model_may_be_missing(server: ServerProcess) -> None:
    for path in ("/v1/completions", "/openai/v1/completions", "/v1/chat/completions"):
        answer = answer_of(server.ask(path, model=None, stream=False))
        assert answer["model"] == server.model
        assert answer["choices"] == answer_of(server.ask(path, stream=False))["choices"]


# ---------------------------------------------------------------------- several choices


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(server: ServerProcess) -> None:
    prompts = ["Once upon a time", "The lantern", "In the morning"]
    fields = {"prompt": prompts, "n": 2, "max_tokens": 12, "temperature": 0.9, "seed": 3}
    answer = server.complete(**fields)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    singles = [
        server.complete(**(fields | {"prompt": prompt, "n": 1, "seed": 3 + j}))
        for prompt in prompts
        for j in (0, 1)
    ]
    assert [c["text"] for c in answer["choices"]] == [s["choices"][0]["text"] for s in singles]
    assert answer["finish_reason"] == singles[0]["finish_reason"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == sum(s["usage"]["completion_tokens"] for s in singles)
    prompts_once = sum(s["usage"]["prompt_tokens"] for s in singles[::2])
    assert usage["prompt_tokens"] == prompts_once


def test_interleaved_choices_each_end_once_with_their_own_usage(server: ServerProcess) -> None:
    fields = {"prompt": ["Once upon a time", "The"], "n": 3, "max_tokens": 10, "temperature": 1, "seed": 5}
    events, answer = server.events(**fields), server.complete(**fields)
    assert texts(events) == {c["index"]: c["text"] for c in answer["choices"]}
    ends = [(data["choices"][0]["index"], data) for name, data in events if name == "done"]
    assert sorted(index for index, _ in ends) == list(range(6))
    assert {name for name, _ in events} == {"token", "done"}
    for index, done in ends:
        tokens = [d for name, d in events if name == "token" and d["choices"][0]["index"] == index]
        assert done["usage"]["completion_tokens"] == len(tokens)
    order = [data["choices"][0]["index"] for name, data in events if name == "token"]
    assert order != sorted(order), "choices of one batch come step by step, not one after another"


def test_lists_of_token_ids(server: ServerProcess) -> None:
    answer = server.complete(prompt=[[5, 6, 7], [8, 9]], max_tokens=2, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "reasoning_tokens": 0,
        },
    }


# ---------------------------------------------------------------------- the prefix cache


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_usage_counts_tokens_cached_under_the_same_salt(server: ServerProcess, own_prompt: OwnPrompt) -> None:
    """A prompt of 40 tokens hits two blocks, 32 tokens, if an earlier request had the same salt."""
    found = 32
    fields: dict[str, Any] = {"prompt": own_prompt(40), "max_tokens": 3, "ignore_eos": True}
    first = server.complete(**fields, cache_salt="tenant a")
    again = server.complete(**fields, cache_salt="tenant a")
    assert (cached(first["usage"]), cached(again["usage"])) == (0, found)
    assert again["choices"] == first["choices"]
    for salt in ("tenant b", None):
        assert cached(server.complete(**fields, cache_salt=salt)["usage"]) == 0
    events = server.events(**fields, cache_salt="tenant a", stream_options={"include_usage": True})
    told = {name: cached(data["usage"]) for name, data in events if name in ("done", "usage")}
    assert told == {"done": found, "usage": found}
    counters = server.client.get("/telemetry").json()["counters"]
    assert counters["cached_tokens"] >= 2 * found
    assert counters["prompt_tokens"] > counters["cached_tokens"]


def test_the_prefix_cache_can_be_emptied(server: ServerProcess, own_prompt: OwnPrompt) -> None:
    fields: dict[str, Any] = {"prompt": own_prompt(40), "max_tokens": 1}
    server.complete(**fields)
    dropped = server.client.post("/reset_prefix_cache", json={}).json()["dropped_blocks"]
    assert dropped > 0
    assert cached(server.complete(**fields)["usage"]) == 0
    assert server.client.get("/reset_prefix_cache").status_code == 405


# ---------------------------------------------------------------------- how it ends


def test_a_model_that_ends_its_text_ends_with_eos(server: ServerProcess) -> None:
    events = server.events(prompt="The end.", max_tokens=900)
    done = events[-1][1]
    assert (done["finish_reason"], done["choices"][0]["finish_reason"]) == ("eos", "stop")
    assert events[-2][1]["token"] == ""
    assert done["usage"]["completion_tokens"] == len(events) - 1


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_string_is_cut_out_and_held_text_is_never_shown(server: ServerProcess, as_list: bool) -> None:
    whole = server.text(max_tokens=40)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 6]  # begins and ends anywhere within tokens
    others = [f"never in the text {number}" for number in range(39)]
    fields = {"max_tokens": 40, "stop": [*others, stop] if as_list else stop}
    answer, events = server.complete(**fields), server.events(**fields)
    assert answer["choices"][0]["text"] == whole[: whole.index(stop)] == texts(events)[0]
    assert answer["finish_reason"] == answer["choices"][0]["finish_reason"] == "stop"
    done = events[-1][1]
    assert done["usage"]["completion_tokens"] == len(events) - 1 == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", ["/openai/v1/completions", "/v1/chat/completions"])
def test_stop_reason_names_the_stop(server: ServerProcess, path: str) -> None:
    chunks = server.chunks(path, max_tokens=20, ignore_eos=True, return_token_ids=True)
    said = [each for chunk in chunks for each in chunk["choices"]]
    assert "stop_reason" not in said[-1], "its length ended it"
    text = "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in said)
    token = said[-2]["token_ids"][0]
    for fields, expected in (
        ({"stop": ["\u2603", text[7:12]]}, text[7:12]),
        ({"stop_token_ids": [token], "stop": "\u2603"}, token),
    ):
        (choice,) = answer_of(server.ask(path, max_tokens=20, ignore_eos=True, **fields))["choices"]
        *others, last = server.chunks(path, max_tokens=20, ignore_eos=True, **fields)
        assert choice["stop_reason"] == last["choices"][0]["stop_reason"] == expected
        assert not any("stop_reason" in chunk["choices"][0] for chunk in others)


# ---------------------------------------------------------------------- usage


def test_include_usage_adds_a_last_event_without_choices(server: ServerProcess) -> None:
    fields = {"prompt": ["One", "Two"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    events = server.events(**fields, stream_options={"include_usage": True})
    assert [name for name, _ in events if name != "token"] == ["done"] * 4 + ["usage"]
    last = events[-1][1]
    assert (last["choices"], last["usage"]) == ([], server.complete(**fields)["usage"])


# ---------------------------------------------------------------------- fields


def test_penalties_and_filters_reach_the_sampler(server: ServerProcess) -> None:
    plain = server.text(max_tokens=40, ignore_eos=True)
    for fields in (
        {"repetition_penalty": 5.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 2.0, "seed": 1},
    ):
        assert server.text(max_tokens=40, ignore_eos=True, **fields) != plain
    for name, value in (("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0)):
        again = server.text(max_tokens=40, ignore_eos=True, temperature=2.0, **{name: value})
        assert again == plain, f"{name} {value} leaves only the likeliest token"


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_have_openais_shape(server: ServerProcess, count: int) -> None:
    fields = {"max_tokens": 6, "ignore_eos": True, "logprobs": count}
    (choice,) = server.complete(**fields)["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert [len(logprobs[key]) for key in keys] == [6] * 4
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(6)]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob <= 0
        assert len(top) == max(count, 1), "the sampled token is always there"
        assert sum(math.exp(value) for value in top.values()) <= 1 + 1e-5
        assert next(iter(top)) == token  # greedy decoding: the sampled token is the likeliest
        assert top[token] == logprob
    streamed = [data["choices"][0]["logprobs"] for name, data in server.events(**fields) if name == "token"]
    assert {key: [part[key][0] for part in streamed] for key in logprobs} == logprobs


def test_logprobs_of_single_bytes_are_distinct(server: ServerProcess) -> None:
    """Each of the four bytes of an emoji is a token, and so are likelier ones in its place."""
    fields = {"prompt": "a🦊", "max_tokens": 0, "echo": True, "logprobs": 5}
    logprobs = server.complete(**fields)["choices"][0]["logprobs"]
    tokens = logprobs["tokens"][-4:]
    assert tokens == [f"bytes:\\x{byte:02x}" for byte in "🦊".encode()]
    for token, logprob, top in zip(
        tokens, logprobs["token_logprobs"][-4:], logprobs["top_logprobs"][-4:], strict=True
    ):
        assert len(top) in (5, 6), "no entry is lost"
        assert top[token] == logprob


def test_without_max_tokens_an_answer_is_shorter_where_fewer_fit(server: ServerProcess) -> None:
    most = server.client.get("/v1/models").json()["data"][0]["max_model_len"]
    for room, expected in ((129, 128), (128, 128), (127, 127), (1, 1)):
        answer = server.complete(prompt=[300] * (most - room), max_tokens=None, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == expected
    unlimited = server.complete(prompt=[300] * (most - 140), max_tokens=-1, ignore_eos=True)
    assert unlimited["usage"]["total_tokens"] == most, "as llama.cpp's clients mean it"
    cut = server.complete(prompt=[300] * most, max_tokens=None, truncate_prompt_tokens=-1, ignore_eos=True)
    assert cut["usage"] | {"prompt_tokens": most - 128, "completion_tokens": 128} == cut["usage"]


# ---------------------------------------------------------------------- the small routes


def test_models_lists_the_served_model(server: ServerProcess, phase: str) -> None:
    answer = server.client.get("/v1/models").json()
    assert answer["object"] == "list"
    (card,) = answer["data"]
    assert (card["id"], card["object"], card["phase"]) == ("zoo:llama-tiny", "model", phase)
    assert card["max_model_len"] == 1024
    assert server.client.get(f"/v1/models/{server.model}").json() == card
    assert_error(server.client.get("/v1/models/owner/name"), 404, "model", "model_not_found")


def test_health_version_and_telemetry(server: ServerProcess, phase: str) -> None:
    assert server.client.get("/health").json() == {"status": "ok", "phase": phase}
    version = server.client.get("/version").json()
    assert (version["phase"], version["device"], version["dtype"]) == (phase, "cpu", "float32")
    assert version["weights"] == "float32"
    server.complete()
    everything = server.client.get("/telemetry").json()
    assert everything["phase"] == phase
    assert everything["max_seq_len"] == 1024
    assert everything["counters"]["requests_finished"] >= 1
    latest = everything["steps"][-1]["step"]
    some = server.client.get("/telemetry", params={"since_step": latest}).json()["steps"]
    assert some[0]["step"] == latest  # another step may have followed, which only released memory


def test_connections_are_kept_alive(server: ServerProcess) -> None:
    for stream in (True, False, True):
        with server.client.stream("POST", "/v1/completions", json=server.body(stream=stream)) as response:
            assert "close" not in response.headers.get("connection", "")
            list(read_events(response)) if stream else response.read()
