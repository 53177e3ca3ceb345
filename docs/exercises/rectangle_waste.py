"""Exercise: how much work a batch wastes because it is a rectangle.

Write `wasted_tokens`, then run `.venv/bin/pytest docs/exercises/rectangle_waste.py`.
The check compares its counts with those of phase 4's telemetry for the same batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from common.engine.engine import Engine
from common.llm import LLM
from common.request import SamplingParams


def wasted_tokens(prompt_lengths: Sequence[int], new_tokens: Sequence[int]) -> tuple[int, int]:
    """Return the work that one batch of phase 4 wastes: (padding tokens of prompts, idle rows of decode steps).

    Prompts are padded to the longest prompt. A row is idle from the end of its request's answer to the end of the
    batch.

    Args:
        prompt_lengths: the length of each request's prompt, in tokens.
        new_tokens: how many tokens each request generates. The prompt's pass generates the first of them.
    """
    raise NotImplementedError("two sums")


# ---------------------------------------------------------------------- the check


@pytest.fixture(scope="module")
def engine() -> Engine:
    return LLM("zoo:llama-tiny", phase="static", dtype="float32", batch_wait_timeout_s=0.0).engine


@pytest.mark.parametrize("seed", range(5))
def test_counts_agree_with_telemetry(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [rng.randint(1, 40) for _ in range(rng.randint(1, 8))]
    new = [rng.randint(1, 12) for _ in prompts]
    before = (engine.telemetry.counters.padded_tokens, engine.telemetry.counters.idle_rows)
    for length, count in zip(prompts, new, strict=True):
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        assert engine.add_request(engine.maker.create([5] * length, params))
    while engine.has_work:
        engine.step()
    counters = engine.telemetry.counters
    counted = (counters.padded_tokens - before[0], counters.idle_rows - before[1])
    assert wasted_tokens(prompts, new) == counted


# ---------------------------------------------------------------------- one way to solve it


def solution(prompt_lengths: Sequence[int], new_tokens: Sequence[int]) -> tuple[int, int]:
    """Both kinds of waste are sums of differences from the request with the longest prompt or answer."""
    padded = sum(max(prompt_lengths) - length for length in prompt_lengths)
    idle = sum(
        max(new_tokens) - count for count in new_tokens
    )  # the prompt's pass generates one token for each request, which cancels out
    return padded, idle
