"""Echoed prompts, log-probabilities and ids of their tokens, which evaluation tools need."""

from __future__ import annotations

import pytest

from common.models.registry import open_checkpoint
from tests.conftest import OwnPrompt
from tests.support.servers import ServerProcess, assert_error

STRICT = "/openai/v1/completions"
PROMPT = "Once upon a time, the fox"


def test_an_echo_comes_before_the_answer(server: ServerProcess) -> None:
    answer = server.complete(prompt=PROMPT)["choices"][0]["text"]
    ids = server.complete(prompt=PROMPT, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    echoed = server.complete(prompt=[PROMPT, "The dog"], echo=True, n=2)
    assert [
        choice["text"].startswith(p)
        for choice, p in zip(echoed["choices"], (PROMPT, PROMPT, "The dog", "The dog"), strict=True)
    ] == [True] * 4
    assert echoed["choices"][0]["text"] == PROMPT + answer
    assert server.complete(prompt=ids, echo=True)["choices"][0]["text"].endswith(PROMPT + answer)
    events = server.events(prompt=PROMPT, echo=True)
    assert events[0][1]["choices"][0]["text"] == PROMPT + events[0][1]["token"]
    assert "".join(data["choices"][0]["text"] for name, data in events if name == "token") == PROMPT + answer
    chunks = server.chunks(STRICT, prompt=PROMPT, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + answer


@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_of_an_echo(server: ServerProcess, count: int) -> None:
    fields = {
        "prompt": PROMPT,
        "max_tokens": 4,
        "ignore_eos": True,
        "logprobs": count,
        "return_token_ids": True,
    }
    alone = server.complete(**fields)["choices"][0]
    choice = server.complete(**fields, echo=True)["choices"][0]
    ids, found = choice["prompt_token_ids"], choice["logprobs"]
    lengths = {name: len(values) for name, values in found.items()}
    assert lengths == dict.fromkeys(("tokens", "token_logprobs", "top_logprobs", "text_offset"), len(ids) + 4)
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert all(value < 0 for value in found["token_logprobs"][1:])
    assert all(count <= len(top) <= count + 1 for top in found["top_logprobs"][1:])
    assert all(
        token in top for token, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True)
    )
    assert found["tokens"][len(ids) :] == alone["logprobs"]["tokens"]
    assert found["token_logprobs"][len(ids) :] == alone["logprobs"]["token_logprobs"]
    assert found["text_offset"][0] == 0
    assert found["text_offset"] == sorted(found["text_offset"])
    shifted = [len(PROMPT) + offset for offset in alone["logprobs"]["text_offset"]]
    assert found["text_offset"][len(ids) :] == shifted
    for token, at in zip(found["tokens"], found["text_offset"], strict=True):
        if token in choice["text"]:
            assert choice["text"][at:].startswith(token) or at == 0
    streamed = server.chunks(STRICT, **fields, echo=True)
    joined = [value for chunk in streamed for value in chunk["choices"][0]["logprobs"]["token_logprobs"]]
    assert joined == found["token_logprobs"]


@pytest.mark.parametrize("form", ["text", "ids", "ids with special tokens"])
def test_offsets_in_an_echo_with_special_tokens(server: ServerProcess, form: str) -> None:
    """Each token stands at its offset; one that the text is without (BOS, before a text) takes no room."""
    tokenizer = open_checkpoint("zoo:llama-tiny").tokenizer()
    text = "<|start_header_id|>user<|end_header_id|>\n\nthe 🦊 ran<|eot_id|>"
    prompt = text if form == "text" else tokenizer.encode(text)
    fields = {"echo": True, "logprobs": 0, "max_tokens": 2, "skip_special_tokens": form == "ids"}
    choice = server.complete(prompt=prompt, **fields)["choices"][0]
    found, specials = choice["logprobs"], set(map(tokenizer.spelled, tokenizer.special_ids))
    assert sum(token in specials for token in found["tokens"]) >= 4
    for number, (token, at) in enumerate(zip(found["tokens"], found["text_offset"], strict=True)):
        left_out = token in specials if form == "ids" else form == "text" and number == 0
        if left_out:
            assert found["text_offset"][number + 1] == at
        elif not token.startswith("bytes:"):
            assert choice["text"].startswith(token, at)


def test_prompt_logprobs_equal_logprobs_of_sampling(server: ServerProcess) -> None:
    """Tokens of an answer, sent as a prompt, have the log-probabilities that they had when they were sampled."""
    fields = {"max_tokens": 20, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    choice = server.complete(prompt=PROMPT, **fields)["choices"][0]
    whole = [*choice["prompt_token_ids"], *choice["token_ids"]]
    again = server.complete(prompt=whole, max_tokens=1, prompt_logprobs=2)["choices"][0]
    told = [
        entry[str(i)]["logprob"] for i, entry in zip(whole[-20:], again["prompt_logprobs"][-20:], strict=True)
    ]
    assert told == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("count", [0, 2])
def test_prompt_logprobs_as_vllm_has_them(server: ServerProcess, count: int) -> None:
    answer = server.complete(
        prompt=[PROMPT, "x"], prompt_logprobs=count, return_token_ids=True, max_tokens=2, n=2
    )
    for choice in answer["choices"]:
        ids, entries = choice["prompt_token_ids"], choice["prompt_logprobs"]
        assert len(entries) == len(ids)
        assert entries[0] is None
        for token_id, entry in zip(ids[1:], entries[1:], strict=True):
            assert max(1, count) <= len(entry) <= count + 1
            assert entry[str(token_id)]["logprob"] <= 0
            assert all(set(each) == {"logprob", "rank", "decoded_token"} for each in entry.values())
            ranked = sorted(entry.values(), key=lambda each: each["rank"])
            assert [each["rank"] for each in ranked[:count]] == list(range(1, count + 1))
            assert [each["logprob"] for each in ranked] == sorted(
                (e["logprob"] for e in ranked), reverse=True
            )
    fields = {"prompt_logprobs": count, "return_token_ids": True, "max_tokens": 3, "ignore_eos": True}
    chunks = server.chunks(STRICT, prompt=PROMPT, **fields)
    assert ["prompt_logprobs" in chunk["choices"][0] for chunk in chunks] == [True, False, False]
    assert chunks[0]["choices"][0]["prompt_logprobs"] == answer["choices"][0]["prompt_logprobs"]
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1, 1, 1]
    assert set(server.complete()["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}


# ---------------------------------------------------------------------- answers without tokens

SCORED = "A prompt that is only scored, by"


def test_max_tokens_0_scores_the_prompt(server: ServerProcess) -> None:
    """With `max_tokens` 0, every wire format has the prompt and its log-probabilities, and no new token."""
    prompts = [SCORED, "Nobody"]
    fields = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 2, "return_token_ids": True}
    one = server.complete(**fields, max_tokens=1, ignore_eos=True)
    none = server.complete(**fields, max_tokens=0)
    prompt_tokens = one["usage"]["prompt_tokens"]
    assert (none["usage"]["prompt_tokens"], none["usage"]["completion_tokens"]) == (prompt_tokens, 0)
    assert none["usage"]["total_tokens"] == prompt_tokens
    assert none["finish_reason"] == "length"
    for with_token, choice in zip(one["choices"], none["choices"], strict=True):
        assert choice["text"] == prompts[choice["index"] // 2]
        assert (choice["finish_reason"], choice["token_ids"]) == ("length", [])
        assert choice["prompt_token_ids"] == with_token["prompt_token_ids"]
        assert choice["logprobs"] == {
            name: all_but_last[:-1] for name, all_but_last in with_token["logprobs"].items()
        }
    named = server.events(**fields, max_tokens=0, stream_options={"include_usage": True})
    assert [name for name, _ in named] == ["done"] * 4 + ["usage"]
    assert named[-1][1]["usage"]["completion_tokens"] == 0
    assert {data["finish_reason"] for _, data in named[:-1]} == {"length"}
    told = sorted((data["choices"][0] for _, data in named[:-1]), key=lambda choice: choice["index"])
    assert told == none["choices"]
    chunks = server.chunks(STRICT, **fields, max_tokens=0)
    assert (
        sorted((chunk["choices"][0] for chunk in chunks), key=lambda choice: choice["index"])
        == none["choices"]
    )


# ---------------------------------------------------------------------- prompts that are cut


@pytest.mark.parametrize(
    ("side", "kept"), [(None, slice(-20, None)), ("left", slice(-20, None)), ("right", slice(20))]
)
def test_a_prompt_is_truncated(
    server: ServerProcess, side: str | None, kept: slice, own_prompt: OwnPrompt
) -> None:
    cut = {"truncate_prompt_tokens": 20, "truncation_side": side, "return_token_ids": True, "max_tokens": 4}
    tokenizer = open_checkpoint("zoo:llama-tiny").tokenizer()
    text = "Once upon a time there was a fox. " * 300  # more than the server takes whole
    token_ids = own_prompt(40)
    for prompt, tokens in ((text, tokenizer.encode(text)), (token_ids, token_ids)):
        (choice,) = server.complete(prompt=prompt, echo=True, **cut)["choices"]
        assert choice["prompt_token_ids"] == tokens[kept]
        whole = server.complete(prompt=tokens[kept], echo=True, max_tokens=4)["choices"][0]
        assert choice["text"] == whole["text"]
    short = server.complete(prompt=[5, 6, 7], **cut)["choices"][0]
    assert short["prompt_token_ids"] == [5, 6, 7]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_truncated_to_what_fits(server: ServerProcess, side: str) -> None:
    """-1 keeps as many prompt tokens as fit with `max_tokens` into the server's 1,024."""
    prompt = [50 + i % 7 for i in range(1500)]
    cut = {
        "truncate_prompt_tokens": -1,
        "truncation_side": side,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    for max_tokens, kept in ((4, 1020), (1, 1023), (100, 924)):
        answer = server.complete(prompt=prompt, max_tokens=max_tokens, **cut)
        expected = prompt[:kept] if side == "right" else prompt[-kept:]
        assert answer["choices"][0]["prompt_token_ids"] == expected
        assert answer["usage"]["completion_tokens"] == max_tokens
    short = server.complete(prompt="A short one", **cut)["choices"][0]
    whole = server.complete(prompt="A short one", return_token_ids=True)["choices"][0]
    assert short["prompt_token_ids"] == whole["prompt_token_ids"]
    assert_error(server.post(prompt=prompt, max_tokens=1024, **cut), 422, "max_tokens")
    fields = {"truncate_prompt_tokens": -1, "max_tokens": None, "min_tokens": 3, "ignore_eos": True}
    messages = [{"role": "user", "content": "Cut it. " * 900}]
    chat = server.ask("/v1/chat/completions", messages=messages, **fields)
    assert chat.json()["usage"]["total_tokens"] == 1024
    assert chat.json()["usage"]["completion_tokens"] == 3
