"""Prefix hits give the same tokens and logits as computing, whichever request computed the blocks.

The identity suite runs phase 8 beside the others. These tests have shared prefixes: conversations that begin alike
and continue their own answers, with a cold and a warm cache, with enough memory and with too little. The model is
Gemma, which has windows and all features of the other architectures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from common.request import SamplingParams
from tests.identity.support import (
    Arrival,
    Subject,
    assert_same,
    prompt_of,
    recorded_logits,
    serve,
    subject_of,
)
from tests.support.engines import Variant
from tests.support.pools import assert_consistent, caching

SYSTEM = 70  # shared first tokens: no multiple of a block size but 1, and more than Gemma's windows
NEW = 9


@pytest.fixture
def trained() -> Subject:
    return subject_of("zoo:gemma3-tiny")


def params_of(index: int) -> SamplingParams:
    """Return sampling parameters: every second request is sampled, the others are greedy."""
    if index % 2:
        return SamplingParams(temperature=0.9, seed=index, top_p=0.95, max_new_tokens=NEW, ignore_eos=True)
    return SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)


def first_turns(subject: Subject) -> list[Arrival]:
    """Return prompts with 0 to 40 own tokens after the shared ones, two of them equal. Half arrive later."""
    system = prompt_of(subject, SYSTEM, seed=1)
    own = [prompt_of(subject, n, seed=10 + n) if n else () for n in (26, 0, 1, 40, 10, 40)]
    return [Arrival(3 * (i // 3), (*system, *each), params_of(i)) for i, each in enumerate(own)]


def next_turns(arrivals: Sequence[Arrival], tokens: dict[str, list[int]], subject: Subject) -> list[Arrival]:
    """Return prompts of prompt, answer and a few more tokens, in another order."""
    turns = [
        Arrival(i, (*a.prompt, *tokens[str(i)], *prompt_of(subject, 5, seed=i)), params_of(i + 1))
        for i, a in enumerate(arrivals)
    ]
    random.Random(3).shuffle(turns)
    return turns


def check(subject: Subject, options: dict[str, Any], *, rounds: int = 3) -> Any:
    """Serve several turns on one engine, and compare each with the request alone. Returns the engine's counters."""
    variant = Variant("phase8_prefix", options)
    engine = subject.engine(variant, max_seq_len=200)
    arrivals = first_turns(subject)
    for _ in range(rounds):
        with recorded_logits() as logits:
            tokens = serve(engine, arrivals)
        for i, arrival in enumerate(arrivals):
            assert_same(f"{variant} {i}", subject, arrival, tokens[str(i)], logits[str(i)])
        assert_consistent(caching(engine))
        arrivals = next_turns(arrivals, tokens, subject)
    return engine.telemetry.counters


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_cold_and_warm(trained: Subject, chunk: int, block_size: int) -> None:
    counters = check(trained, {"block_size": block_size, "prefill_chunk_size": chunk}, rounds=2)
    least = SYSTEM * 3 // 4 * 8  # most of the possible hits in the system prompt
    assert counters.cached_tokens > least
    assert counters.evictions == 0


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("mixed", [True, False])
def test_with_too_little_memory(trained: Subject, mixed: bool, block_size: int) -> None:
    """Blocks are evicted, and sequences are preempted. Their own blocks may be evicted, too."""
    counters = check(
        trained,
        {
            "block_size": block_size,
            "num_blocks": 176 // block_size,
            "prefill_chunk_size": 33,
            "prefill_token_budget": None,
            "mixed_batches": mixed,
        },
    )
    assert counters.evictions > 0
    assert counters.preemptions > 0
    assert counters.cached_tokens > 0


@pytest.mark.parametrize("options", [{"use_chunked_prefill": False}, {"max_batch_size": 1}], ids=str)
def test_without_chunks_and_one_at_a_time(trained: Subject, options: dict[str, Any]) -> None:
    assert check(trained, options | {"block_size": 4}, rounds=2).cached_tokens > SYSTEM * 4


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_random_weights_hide_nothing(block_size: int) -> None:
    options = {"block_size": block_size, "prefill_chunk_size": 20}
    assert check(subject_of("random:gemma3"), options, rounds=2).cached_tokens > 0


def test_without_caching_nothing_is_found(trained: Subject) -> None:
    """Otherwise the comparisons above would compare the cache with itself."""
    arrivals = first_turns(trained)
    engine = trained.engine(Variant("phase8_prefix", {"enable_prefix_caching": False}), max_seq_len=200)
    tokens = serve(engine, arrivals)
    assert serve(engine, arrivals) == tokens
    assert engine.telemetry.counters.cached_tokens == 0
    caching_engine = trained.engine(Variant("phase8_prefix"), max_seq_len=200)
    assert serve(caching_engine, arrivals) == tokens
    computed = caching_engine.telemetry.counters.prefill_tokens
    assert computed < engine.telemetry.counters.prefill_tokens / 2 - 16 * len(arrivals)
