"""A prompt in chunks gives the tokens and logits of a whole prompt, in both backends and for all sizes.

The identity suite runs a few chunked variants under load. These tests have lengths at the edges of chunks. The
model is Gemma, which has windows and all features of the other architectures.
"""

from __future__ import annotations

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

NEW_TOKENS = 12
WINDOW = 16  # the zoo's Gemma
CHUNKED_BOUND = 2e-5  # × max(1, max |logit|)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)


def backend(name: str) -> dict[str, Any]:
    return {"paged": {"block_size": 4}, "contiguous": {"kv_cache_backend": "contiguous"}}[name]


def edges(chunk: int) -> list[int]:
    return sorted({1, max(1, chunk - 1), chunk, chunk + 1, 3 * chunk + 1})


def check(subject: Subject, options: dict[str, Any], lengths: list[int], seed: int = 0) -> None:
    """Serve prompts of these lengths, one arriving in each step, and compare each with the request alone."""
    variant = Variant("phase7_chunked", options)
    arrivals = [Arrival(i, prompt_of(subject, n, seed=n + seed), GREEDY) for i, n in enumerate(lengths)]
    engine = subject.engine(variant, max_seq_len=max(lengths) + NEW_TOKENS, max_batch_size=len(lengths))
    with recorded_logits() as logits:
        tokens = serve(engine, arrivals)
    for i, arrival in enumerate(arrivals):
        assert len(tokens[str(i)]) == NEW_TOKENS
        assert_same(f"{variant} {lengths[i]}", subject, arrival, tokens[str(i)], logits[str(i)])


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "apart"])
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_prompts_at_a_chunks_edge(chunk: int, kind: str, mixed: bool) -> None:
    options = {"prefill_chunk_size": chunk, "mixed_batches": mixed, **backend(kind)}
    for budget in (chunk, None) if chunk < 512 else (chunk,):  # with long chunks, one budget is enough
        check(subject_of("zoo:gemma3-tiny"), {**options, "prefill_token_budget": budget}, edges(chunk))


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
@pytest.mark.parametrize("chunk", [5, 12, 16, 20, 33])
def test_across_the_window_amid_a_chunk(chunk: int, kind: str) -> None:
    """Gemma's windows (16) begin inside the chunk, at its edge, or several chunks before."""
    drawn = subject_of("random:gemma3")
    assert {layer.window for layer in drawn.model.config.layers} == {None, WINDOW}
    lengths = [WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + chunk, 2 * WINDOW + 3, 3 * chunk + 1, 70]
    check(drawn, {"prefill_chunk_size": chunk, "prefill_token_budget": 2 * chunk, **backend(kind)}, lengths)


def measure(subject: Subject, chunk: int, kind: str) -> float:
    largest = 0.0
    for n in (chunk + 1, 3 * chunk + 1, 100, 200):
        prompt = prompt_of(subject, n, seed=n)
        params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
        logits = []
        for size in (512, chunk):
            engine = subject.engine(
                Variant("phase7_chunked", {"prefill_chunk_size": size, **backend(kind)}), max_seq_len=256
            )
            with recorded_logits() as seen:
                serve(engine, [Arrival(0, prompt, params)])
            assert engine.telemetry.counters.prefill_tokens == n
            assert engine.telemetry.counters.passes == -(-n // size)
            logits.append(seen["0"][0])
        scale = max(1.0, logits[0].abs().max().item())
        largest = max(largest, (logits[1] - logits[0]).abs().max().item() / scale)
    return largest


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
@pytest.mark.parametrize("chunk", [*(pytest.param(each, marks=pytest.mark.slow) for each in (1, 16)), 7, 64])
@pytest.mark.parametrize("name", ["zoo:gemma3-tiny", "random:gemma3"])
def test_the_first_tokens_logits_chunked_against_whole(name: str, chunk: int, kind: str) -> None:
    """The difference at the last prompt position (printed with -s) comes from chunking alone.

    It is zero if the model is batch invariant. Otherwise the order of sums depends on the number of rows.
    """
    subject = subject_of(name)
    difference = measure(subject, chunk, kind)
    print(f"{name} {kind}: largest relative difference of logits {difference:.2e}")
    assert difference <= (0.0 if subject.model.batch_invariant else CHUNKED_BOUND)
