"""A prompt ends or is preempted in the second of four chunks: its memory is freed, neighbours are not affected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.engine.engine import Engine
from common.request import Request, RequestState, StepOutput
from tests.support.engines import (
    ALLERGEN,
    Allergic,
    Variant,
    add,
    assert_served,
    end_of,
    greedy,
    ids,
)

CHUNK = 8

Build = Callable[..., Engine]


@pytest.fixture
def engine_of(variant: Variant) -> Build:
    def build(model: Any = None, **options: Any) -> Engine:
        sizes = {"prefill_chunk_size": CHUNK, "block_size": 4, "num_blocks": 60, "max_batch_size": 7}
        return variant.build(model, **(sizes | options))

    return build


def assert_held_by(engine: Engine, requests: list[Request]) -> None:
    """Assert that these requests hold all reserved memory."""
    pool = engine.runner.pool
    assert pool.reserved_tokens == sum(pool.capacity(r.slot) for r in requests if r.slot is not None)


def prompt_with(token_id: int, at: int) -> list[int]:
    """Return four chunks with one special token."""
    prompt = [(5 * i + 1) % 250 for i in range(4 * CHUNK)]
    prompt[at] = token_id
    return prompt


def decoders_of(engine: Engine) -> tuple[list[Request], list[StepOutput]]:
    """Return three requests that decode, and their outputs so far."""
    requests = [add(engine, [i + 1] * 5, greedy(20)) for i in range(3)]
    outputs = [output for _ in range(3) for output in engine.step()]
    assert all(request.state is RequestState.DECODE for request in requests)
    return requests, outputs


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("budget", [CHUNK, None])
def test_a_failure_in_chunk_2_of_4(engine_of: Build, backend: str, mixed: bool, budget: int | None) -> None:
    engine = engine_of(Allergic(), kv_cache_backend=backend, mixed_batches=mixed, prefill_token_budget=budget)
    decoders, outputs = decoders_of(engine)
    victim = add(engine, prompt_with(ALLERGEN, at=CHUNK + 3), greedy(5))
    behind = add(engine, [77] * 20, greedy(5))
    outputs += engine.step()
    assert victim.prefill_progress == CHUNK
    slot = victim.slot
    assert slot is not None
    failed = engine.step()
    end = end_of(failed, victim)
    assert (str(end.error), end.token_id, end.completion_tokens) == ("allergic", None, 0)
    assert engine.runner.pool.get_seq_len(slot) == victim.prefill_progress == CHUNK, "lengths are left alone"
    assert [output.request_id for output in failed[:3]] == ids(decoders), "a token in this very step"
    outputs += failed + engine.step()
    assert victim.slot is None
    assert_held_by(engine, [*decoders, behind])
    assert_served(engine, [*decoders, behind], outputs)


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
@pytest.mark.parametrize("mixed", [True, False])
def test_a_cancellation_in_chunk_2_of_4(engine_of: Build, backend: str, mixed: bool) -> None:
    engine = engine_of(kv_cache_backend=backend, mixed_batches=mixed)
    decoders, outputs = decoders_of(engine)
    victim = add(engine, prompt_with(0, at=0), greedy(5))
    outputs += engine.step() + engine.step()
    assert (victim.state, victim.prefill_progress) == (RequestState.PREFILL, 2 * CHUNK)
    assert_held_by(engine, [*decoders, victim])
    engine.cancel(victim.request_id)
    outputs += engine.step()
    end = end_of(outputs, victim)
    assert (end.finish_reason, end.token_id, end.completion_tokens) == ("cancelled", None, 0)
    assert victim.slot is None
    assert_held_by(engine, decoders)
    assert_served(engine, decoders, outputs)


@pytest.mark.parametrize("mixed", [True, False])
def test_a_preemption_in_chunk_2_of_4(engine_of: Build, mixed: bool) -> None:
    """Six decoding requests take a block each a step. The latest request is preempted between its chunks."""
    # Admission takes 32 of 40 free blocks and keeps 8 back. Two steps later the six requests need more than 8.
    engine = engine_of(num_blocks=76, block_size=1, mixed_batches=mixed, prefill_token_budget=None)
    decoders = [add(engine, [i + 1] * 5, greedy(20)) for i in range(6)]
    outputs = engine.step()
    victim = add(engine, prompt_with(0, at=0), greedy(10))
    outputs += engine.step() + engine.step()
    assert (victim.state, victim.prefill_progress) == (RequestState.PREFILL, 2 * CHUNK)
    assert engine.scheduler.preemptions == 0
    told = engine.step()
    assert engine.scheduler.preemptions == 1
    assert (victim.state, victim.slot, victim.prefill_progress) == (RequestState.WAITING, None, 0)
    assert [output.request_id for output in told] == ids(decoders)
    assert_held_by(engine, decoders)
    assert_served(engine, [*decoders, victim], outputs + told)
