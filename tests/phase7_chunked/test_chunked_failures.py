"""A prompt of four chunks ends or pauses in the second one: its blocks return and nobody else notices."""

from __future__ import annotations

from typing import Any

import pytest

from common.engine import Engine
from common.errors import NaNLogitsError
from common.request import Request, RequestState, StepOutput
from tests.engine_helpers import (
    RememberingModel,
    add,
    assert_all_free,
    build,
    continuation,
    end_of,
    greedy,
    run,
    solo,
    tokens_of,
)
from tests.phase6_paged.support import assert_consistent, assert_streams, paged
from tests.phase6_paged.test_paged_runner import ALLERGEN, Allergic, nan_model

CHUNK = 8


def engine_of(model: Any = None, **options: Any) -> Engine:
    return build(
        "phase7_chunked",
        model,
        **{"prefill_chunk_size": CHUNK, "block_size": 4, "num_blocks": 60, "max_batch_size": 6} | options,
    )


def assert_held_by(engine: Engine, requests: list[Request]) -> None:
    """All memory that is taken is theirs."""
    pool = engine.runner.pool
    assert pool.reserved_tokens == sum(pool.capacity(r.slot) for r in requests if r.slot is not None)


def prompt_with(token_id: int, at: int) -> list[int]:
    """Four chunks with one special token."""
    prompt = [(5 * i + 1) % 250 for i in range(4 * CHUNK)]
    prompt[at] = token_id
    return prompt


def decoders_of(engine: Engine, count: int = 3) -> list[Request]:
    requests = [add(engine, [i + 1] * 5, greedy(20)) for i in range(count)]
    for _ in range(count):
        engine.step()
    assert all(r.state is RequestState.DECODE for r in requests)
    return requests


def assert_unaffected(outputs: list[StepOutput], requests: list[Request], told: dict[str, int]) -> None:
    """Each got all its tokens, the first ones before `outputs` began."""
    for own in requests:
        expected = continuation(own.prompt_token_ids, own.params.max_new_tokens)
        assert tokens_of(outputs, own) == expected[told[own.request_id] :]


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("budget", [CHUNK, None])
def test_a_failure_in_chunk_2_of_4(backend: str, mixed: bool, budget: int | None) -> None:
    engine = engine_of(Allergic(), kv_cache_backend=backend, mixed_batches=mixed, prefill_token_budget=budget)
    decoders = decoders_of(engine)
    told = {r.request_id: r.num_generated_tokens for r in decoders}
    victim = add(engine, prompt_with(ALLERGEN, at=CHUNK + 3), greedy(5))
    behind = add(engine, [77] * 20, greedy(5))
    told[behind.request_id] = 0
    outputs = engine.step()
    assert victim.prefill_progress == CHUNK
    slot = victim.slot
    assert slot is not None
    outputs += engine.step()
    end = end_of(outputs, victim)
    assert str(end.error) == "allergic"
    assert (end.token_id, end.completion_tokens) == (None, 0)
    assert victim.prefill_progress == CHUNK
    assert engine.runner.pool.get_seq_len(slot) == CHUNK, "a failed pass leaves lengths alone"
    assert [o.request_id for o in outputs[-4:-1]] == [r.request_id for r in decoders], (
        "a token in this very step"
    )
    outputs += engine.step()
    assert victim.slot is None
    assert_held_by(engine, [*decoders, behind])
    outputs += run(engine)
    assert_unaffected(outputs, [*decoders, behind], told)
    assert_all_free(engine)


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
@pytest.mark.parametrize("mixed", [True, False])
def test_a_cancellation_in_chunk_2_of_4(backend: str, mixed: bool) -> None:
    engine = engine_of(RememberingModel(), kv_cache_backend=backend, mixed_batches=mixed)
    decoders = decoders_of(engine)
    told = {r.request_id: r.num_generated_tokens for r in decoders}
    victim = add(engine, prompt_with(0, at=0), greedy(5))
    outputs = engine.step() + engine.step()
    assert (victim.state, victim.prefill_progress) == (RequestState.PREFILL, 2 * CHUNK)
    assert_held_by(engine, [*decoders, victim])
    engine.cancel(victim.request_id)
    outputs += engine.step()
    end = end_of(outputs, victim)
    assert (end.finish_reason, end.token_id, end.completion_tokens) == ("cancelled", None, 0)
    assert victim.slot is None
    assert_held_by(engine, decoders)
    assert tokens_of(outputs, victim) == []
    outputs += run(engine)
    assert_unaffected(outputs, decoders, told)
    assert_all_free(engine)


@pytest.mark.parametrize("mixed", [True, False])
def test_a_preemption_in_chunk_2_of_4(mixed: bool) -> None:
    """Six who decode take a block a step; the latest, amid its chunks, gives way and still gets its tokens."""
    # Admission of 32 tokens keeps 8 of 40 free blocks back. Two steps later the six need more than those.
    engine = engine_of(
        num_blocks=76,
        block_size=1,
        mixed_batches=mixed,
        max_batch_size=7,
        prefill_token_budget=None,
    )
    decoders = [add(engine, [i + 1] * 5, greedy(20)) for i in range(6)]
    outputs = engine.step()
    victim = add(engine, prompt_with(0, at=0), greedy(10))
    outputs += engine.step() + engine.step()
    assert (victim.state, victim.prefill_progress) == (RequestState.PREFILL, 2 * CHUNK)
    assert engine.scheduler.preemptions == 0
    told = engine.step()
    assert engine.scheduler.preemptions == 1
    assert (victim.state, victim.slot, victim.prefill_progress) == (RequestState.WAITING, None, 0)
    assert [o.request_id for o in told] == [r.request_id for r in decoders]
    assert_held_by(engine, decoders)
    outputs += told + run(engine)
    assert_streams(
        outputs,
        {
            r.request_id: continuation(r.prompt_token_ids, r.params.max_new_tokens)
            for r in [*decoders, victim]
        },
    )
    assert_all_free(engine)


@pytest.mark.parametrize("mixed", [True, False])
def test_one_who_fails_beside_other_chunks_takes_none_of_them_along(mixed: bool) -> None:
    engine = engine_of(Allergic(), mixed_batches=mixed, prefill_token_budget=None)
    victim = add(engine, prompt_with(ALLERGEN, at=CHUNK), greedy(5))
    others = [add(engine, [i + 3] * (4 * CHUNK - i), greedy(6)) for i in range(3)]
    outputs = run(engine)
    assert str(end_of(outputs, victim).error) == "allergic"
    assert_streams(
        [o for o in outputs if o.request_id != victim.request_id],
        {r.request_id: continuation(r.prompt_token_ids, 6) for r in others},
    )
    counters = engine.telemetry.counters
    # The pass of four chunks, its half with the victim, and the victim's own.
    assert (counters.failed_passes, counters.requests_failed, counters.reclaimed_slots) == (3, 1, 0)
    assert_all_free(engine)


def test_a_leak_planted_before_a_failing_chunk_is_reclaimed() -> None:
    engine = engine_of(Allergic())
    victim = add(engine, prompt_with(ALLERGEN, at=CHUNK), greedy(5))
    engine.step()
    paged(engine).allocator.allocate(2, owner=-1)
    assert [o.request_id for o in engine.step()] == [victim.request_id]
    assert engine.telemetry.counters.reclaimed_slots == 2
    run(engine)
    assert_consistent(paged(engine))
    assert paged(engine).allocator.num_free == 60


@pytest.mark.parametrize("mixed", [True, False])
def test_a_nan_in_chunk_2_stays_with_its_owner(mixed: bool) -> None:
    model = nan_model()
    engine = engine_of(model, mixed_batches=mixed, num_blocks=24)
    neighbours = [add(engine, list(range(20 + i, 28 + 2 * i)), greedy(20, ignore_eos=True)) for i in range(2)]
    outputs = engine.step() + engine.step()
    sick = add(engine, prompt_with(ALLERGEN, at=CHUNK + 3), greedy(5))
    while not sick.is_terminal:
        outputs += engine.step()
    assert isinstance(end_of(outputs, sick).error, NaNLogitsError)
    assert sick.prefill_progress == 4 * CHUNK, "only the last chunk has logits to look at"
    heir = add(engine, [7, 8], greedy(20, ignore_eos=True))
    outputs += run(engine)
    for own in (*neighbours, heir):
        assert tokens_of(outputs, own) == solo(model, own.prompt_token_ids, own.params)
    assert_all_free(engine)


@pytest.mark.parametrize("how", ["cancel", "preempt"])
def test_a_nan_that_nobody_has_seen_yet_goes_to_no_other(how: str) -> None:
    """A chunk that is not the last has no logits to look at: its NaN is in the cache when its owner leaves."""
    model = nan_model()
    engine = engine_of(model, num_blocks=24)
    pool = paged(engine)
    neighbour = add(engine, list(range(20, 30)), greedy(30, ignore_eos=True))
    outputs = engine.step() + engine.step()
    sick = add(engine, prompt_with(ALLERGEN, at=CHUNK + 3), greedy(5))
    outputs += engine.step() + engine.step()
    assert sick.prefill_progress == 2 * CHUNK
    assert sick.slot is not None
    tainted = [b for b in pool.block_table(sick.slot) if pool.k[0][b].isnan().any()]
    assert tainted
    if how == "preempt":
        lost = pool.allocator.allocate(pool.allocator.num_free, owner=-1)
        while engine.scheduler.preemptions == 0:
            outputs += engine.step()
            assert sick.prefill_progress < 4 * CHUNK
        pool.allocator.free(lost)
    engine.cancel(sick.request_id)
    outputs += engine.step()
    pool.allocator._free.sort(key=tainted.count)  # the tainted block is the next to be given out
    heir = add(engine, [7, 8], greedy(20, ignore_eos=True))
    outputs += run(engine)
    assert end_of(outputs, sick).finish_reason == "cancelled"
    for own in (neighbour, heir):
        assert end_of(outputs, own).error is None
        assert tokens_of(outputs, own) == solo(model, own.prompt_token_ids, own.params)
    assert_all_free(engine)
