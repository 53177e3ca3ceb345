"""24 requests at once on less and less memory: everybody gets the same tokens, only later."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from common.engine import Engine
from common.models.layers import CausalLM
from common.request import Request, SamplingParams, StepOutput
from tests.engine_helpers import (
    RememberingModel,
    add,
    assert_all_free,
    build,
    continuation,
    greedy,
    solo,
    tiny_model,
)
from tests.phase6_paged.support import assert_consistent, assert_streams, paged, shuffle_free_blocks

REQUESTS = 24
BLOCK_SIZE = 4
AMPLE = 400
SMALLEST = 13  # the longest request alone: 52 tokens


@dataclass(frozen=True)
class Order:
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def blocks(self) -> int:
        return -(-(len(self.prompt) + self.params.max_new_tokens) // BLOCK_SIZE)


def orders() -> list[Order]:
    rng = random.Random(4)
    drawn = [
        Order(
            tuple(rng.randrange(250) for _ in range(rng.randint(1, 14))),
            greedy(rng.randint(8, 36), ignore_eos=True),
        )
        for _ in range(REQUESTS - 1)
    ]
    return [*drawn[:9], Order(tuple(range(100, 115)), greedy(37, ignore_eos=True)), *drawn[9:]]


@pytest.fixture(scope="module")
def llama() -> CausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def alone(llama: CausalLM) -> list[list[int]]:
    return [solo(llama, order.prompt, order.params) for order in orders()]


def progress(request: Request) -> tuple[int, int]:
    """What a request has come to: tokens told, tokens computed."""
    return len(request.token_ids), request.prefill_progress


def serve(engine: Engine) -> tuple[list[Request], list[StepOutput], int]:
    """All orders at once, to their ends; in every step the oldest moves on and the books are right."""
    requests = [add(engine, order.prompt, order.params, str(i)) for i, order in enumerate(orders())]
    pool = paged(engine)
    outputs: list[StepOutput] = []
    steps = 0
    while any(not r.is_terminal for r in requests):
        oldest = next(r for r in requests if not r.is_terminal)
        before = progress(oldest)
        outputs += engine.step()
        steps += 1
        assert progress(oldest) > before, f"step {steps}: the oldest stands still"
        assert_consistent(pool)
        waiting = [r.arrival for r in engine.scheduler.waiting]  # type: ignore[attr-defined]
        assert waiting == sorted(waiting)
        shuffle_free_blocks(pool, seed=steps)
        assert steps < 3000, "no progress"
    outputs += engine.step()
    assert pool.audit_blocks() == set()
    assert_all_free(engine)
    return requests, outputs, steps


def report(name: str, blocks: int, engine: Engine, steps: int) -> None:
    busiest = max(record.active for record in engine.telemetry.records)
    print(
        f"{name}: {blocks:4d} blocks of {BLOCK_SIZE}, {engine.scheduler.preemptions:4d} preemptions, "
        f"{steps:4d} steps, {busiest:2d} at once, tokens identical"
    )


def options(blocks: int) -> dict[str, Any]:
    return {
        "block_size": BLOCK_SIZE,
        "num_blocks": blocks,
        "max_batch_size": REQUESTS,
        "max_waiting_requests": REQUESTS,
    }


def test_the_smallest_pool_is_the_smallest_legal() -> None:
    assert max(order.blocks for order in orders()) == SMALLEST
    engine = build("phase6_paged", **options(SMALLEST - 1))
    (largest,) = (order for order in orders() if order.blocks == SMALLEST)
    with pytest.raises(ValueError, match="this server holds 48 a request"):
        engine.create_request(largest.prompt, largest.params)


@pytest.mark.parametrize("blocks", [AMPLE, 150, 100, 60, 40, 25, 16, SMALLEST])
def test_the_same_tokens_at_every_size(blocks: int, llama: CausalLM, alone: list[list[int]]) -> None:
    engine = build("phase6_paged", llama, **options(blocks))
    requests, outputs, steps = serve(engine)
    report("phase 6", blocks, engine, steps)
    assert_streams(outputs, {r.request_id: t for r, t in zip(requests, alone, strict=True)})
    assert engine.telemetry.counters.preemptions == engine.scheduler.preemptions
    assert (engine.scheduler.preemptions > 0) == (blocks <= 100)


def test_every_size_from_ample_to_the_smallest() -> None:
    """With a model that only remembers: many sizes, all of the small ones."""
    for blocks in [*range(SMALLEST, 40), *range(40, 100, 6), AMPLE]:
        engine = build("phase6_paged", RememberingModel(), **options(blocks))
        requests, outputs, _ = serve(engine)
        assert_streams(
            outputs,
            {r.request_id: continuation(r.prompt_token_ids, r.params.max_new_tokens) for r in requests},
        )
