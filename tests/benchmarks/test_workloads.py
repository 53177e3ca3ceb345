"""The workloads follow their table exactly, and are the same on every machine."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from benchmarks.workloads import (
    CHAT_WORKLOADS,
    WORKLOADS,
    PromptWriter,
    Workload,
    build,
    identical_requests,
    send_times,
)


@pytest.mark.parametrize("name", WORKLOADS)
def test_lengths_and_counts(name: str, writer: PromptWriter) -> None:
    workload = WORKLOADS[name]
    plan = build(workload, writer, seed=3)
    assert len(plan) == workload.requests
    assert len(build(workload, writer, quick=True)) == max(min(workload.requests, 4), workload.requests // 4)
    assert [request.index for request in plan] == list(range(workload.requests))
    own = [range(lengths.low, lengths.high + 1) for _, lengths in workload.prompts]
    for request in plan:
        assert isinstance(request.prompt, list)
        before = 0 if request.follows is None else plan[request.follows].prompt_tokens
        answer = 0 if request.follows is None else plan[request.follows].max_tokens
        assert before + answer + len(request.prompt) == request.prompt_tokens
        assert any(len(request.prompt) - workload.shared_prefix in lengths for lengths in own)
        assert workload.new_tokens.low <= request.max_tokens <= workload.new_tokens.high
        assert all(0 <= token_id < 2048 for token_id in request.prompt)


def test_chunked_prefill_has_its_shares_exactly(writer: PromptWriter) -> None:
    for seed in range(3):
        lengths = [
            request.prompt_tokens for request in build(WORKLOADS["chunked_prefill"], writer, seed=seed)
        ]
        assert sum(1024 <= length <= 2048 for length in lengths) == 36
        assert sum(64 <= length <= 128 for length in lengths) == 12
        assert any(length <= 128 for length in lengths[:24])  # mixed, not sorted
        assert any(length <= 128 for length in lengths[24:])


def test_prefix_caching_shares_1024_tokens_and_no_more(writer: PromptWriter) -> None:
    prompts = [request.prompt for request in build(WORKLOADS["prefix_caching"], writer)]
    assert all(prompt[:1024] == prompts[0][:1024] for prompt in prompts)
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == len(prompts)


def test_multi_turn_is_eight_chats_of_six_turns(writer: PromptWriter) -> None:
    plan = build(WORKLOADS["multi_turn"], writer, seed=2)
    chats = [[request] for request in plan if request.follows is None]
    for request in plan[len(chats) :]:
        (own,) = [chat for chat in chats if chat[-1].index == request.follows]
        own.append(request)
    assert [len(chat) for chat in chats] == [6] * 8
    for chat in chats:
        assert all(len(request.prompt) <= 256 for request in chat)
        assert [r.prompt_tokens for r in chat] == sorted(r.prompt_tokens for r in chat)
    prompts = [tuple(request.prompt) for request in plan]
    assert len(set(prompts)) == 48
    assert [p[0] for p in prompts].count(prompts[0][0]) == 8, "later turns have no token that begins a text"
    mean = sum(request.prompt_tokens for request in plan) / 48
    assert mean == pytest.approx(WORKLOADS["multi_turn"].mean_prompt_tokens, rel=0.1)
    assert len([r for r in build(WORKLOADS["multi_turn"], writer, quick=True) if r.follows is None]) == 2


@pytest.mark.parametrize(
    "workload", [WORKLOADS["chunked_prefill"], *CHAT_WORKLOADS.values()], ids=lambda each: each.name
)
def test_the_seed_alone_decides(workload: Workload, writer: PromptWriter) -> None:
    assert build(workload, writer, seed=5) == build(workload, writer, seed=5)
    assert build(workload, writer, seed=5) != build(workload, writer, seed=6)


def test_a_factor_moves_send_times_and_nothing_else(writer: PromptWriter) -> None:
    workload = WORKLOADS["chunked_prefill"]
    table, faster = build(workload, writer), build(workload, writer, factor=4.0)
    assert [request.send_at_s for request in faster] == pytest.approx([r.send_at_s / 4 for r in table])
    assert [(r.prompt, r.max_tokens) for r in faster] == [(r.prompt, r.max_tokens) for r in table]


def test_arrivals_that_are_not_random() -> None:
    assert send_times("uniform", 5, 4.0, random.Random(0)) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert send_times("burst", 3, None, random.Random(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", range(5))
def test_poisson_arrivals_keep_the_rate_and_are_random(seed: int) -> None:
    times = send_times("poisson", 2000, 6.0, random.Random(seed))
    assert times[0] == 0.0
    assert times == sorted(times)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert 1 / statistics.mean(gaps) == pytest.approx(6.0, rel=0.10)
    # The gaps of a Poisson process have a standard deviation equal to their mean. Even gaps would have none.
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1.0, abs=0.12)
    few = send_times("poisson", 48, 6.0, random.Random(seed))
    assert 47 / few[-1] == pytest.approx(6.0, rel=0.10)


def test_identical_requests_differ_in_text_only(writer: PromptWriter) -> None:
    requests = identical_requests(writer, count=4, prompt_tokens=50, new_tokens=7, seed="x")
    assert {(request.prompt_tokens, request.max_tokens) for request in requests} == {(50, 7)}
    assert all(isinstance(request.prompt, list) and len(request.prompt) == 50 for request in requests)
    assert len({tuple(request.prompt) for request in requests}) == 4
