"""Compares `wasted_tokens` with what phase 4's telemetry counts while it runs the batch."""

from __future__ import annotations

import random

import pytest
from rectangle_waste import wasted_tokens

from common.engine import Engine
from common.llm import LLM
from common.request import SamplingParams


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
        assert engine.add_request(engine.create_request([5] * length, params))
    while engine.has_work:
        engine.step()
    counters = engine.telemetry.counters
    counted = (counters.padded_tokens - before[0], counters.idle_rows - before[1])
    assert wasted_tokens(prompts, new) == counted
