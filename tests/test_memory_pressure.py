"""24 requests at once on less and less memory: every request gets the same tokens, only later."""

from __future__ import annotations

import random
from typing import Any

import pytest

from common.engine.engine import Engine
from common.models.layers import CausalLM
from common.request import Request
from common.startup.phases import find_phase, phase_names
from tests.support.engines import Variant, add, assert_all_free, assert_answered, build, greedy
from tests.support.pools import assert_consistent, paged, shuffle_free_blocks

BLOCK_SIZE = 4
AMPLE = 400
SMALLEST = 13  # blocks of the longest request alone: 52 tokens
CHUNKS = {"prefill_chunk_size": 4, "prefill_token_budget": 8}
VARIANTS = [
    *(
        Variant.of(name, **CHUNKS)
        for name in phase_names()
        if "num_blocks" in find_phase(name).Config.model_fields
    ),
    Variant("phase7_chunked", {"use_chunked_prefill": False}),
    Variant("phase7_chunked", CHUNKS | {"mixed_batches": False}),
]


def sizes() -> list[tuple[int, int]]:
    """Return prompt tokens and new tokens of each request. One request fills the smallest pool alone."""
    draw = random.Random(4)
    drawn = [(draw.randint(1, 14), draw.randint(8, 36)) for _ in range(23)]
    return [*drawn[:9], (15, 37), *drawn[9:]]


def engine_of(variant: Variant, model: Any, blocks: int, **options: Any) -> Engine:
    seats = {"max_batch_size": 24, "max_waiting_requests": 24}
    return variant.build(model, block_size=BLOCK_SIZE, num_blocks=blocks, **seats, **options)


def progress(request: Request) -> tuple[int, int]:
    """Return the progress of a request: its number of tokens, and how many of them are computed."""
    return len(request.token_ids), request.prefill_progress


def serve(engine: Engine, model: Any = None) -> None:
    """Run all requests at once, to their ends. In every step the oldest must advance, and memory be consistent."""
    draw = random.Random(7)
    requests = [
        add(engine, [draw.randrange(250) for _ in range(prompt)], greedy(new, ignore_eos=True))
        for prompt, new in sizes()
    ]
    pool = paged(engine)
    outputs = []
    steps = still = 0
    while alive := [request for request in requests if not request.is_terminal]:
        before = progress(alive[0])
        outputs += engine.step()
        steps += 1
        still = still + 1 if progress(alive[0]) == before else 0
        assert still <= getattr(engine.config, "pipeline_depth", 0), f"step {steps}: the oldest stands still"
        assert_consistent(pool)
        waiting = [request.arrival for request in engine.scheduler.waiting]
        assert waiting == sorted(waiting)
        shuffle_free_blocks(pool, seed=steps)
        assert steps < 3000, "no progress"
    while engine.has_work:
        assert engine.step() == []
    assert_answered(outputs, requests, model)
    assert engine.telemetry.counters.preemptions == engine.scheduler.preemptions
    assert_all_free(engine)


def test_the_smallest_pool_is_the_smallest_legal() -> None:
    assert max(-(-(prompt + new) // BLOCK_SIZE) for prompt, new in sizes()) == SMALLEST
    engine = build("phase6_paged", block_size=BLOCK_SIZE, num_blocks=SMALLEST - 1)
    with pytest.raises(ValueError, match="this server holds 48 a request"):
        engine.create_request([1] * 15, greedy(37))


@pytest.mark.parametrize(
    "blocks", [*(pytest.param(each, marks=pytest.mark.slow) for each in (AMPLE, 40)), SMALLEST]
)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_same_tokens_at_every_size(variant: Variant, blocks: int, llama: CausalLM) -> None:
    engine = engine_of(variant, llama, blocks)
    serve(engine, llama)
    assert (engine.scheduler.preemptions > 0) == (blocks < AMPLE)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_sizes_from_the_smallest_to_ample(variant: Variant, step: int) -> None:
    """The model is a `RememberingModel`, which is fast enough for every small size."""
    for blocks in [*range(SMALLEST, 26, step), *range(26, 100, 8 * step), AMPLE]:
        engine = engine_of(variant, None, blocks)
        serve(engine)
