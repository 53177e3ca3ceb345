"""Faults in different places while blocks are shared: neighbours keep their tokens, and audits find no leak."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from common.engine.engine import Engine
from common.errors import NaNLogitsError
from common.request import Request, RequestState, StepOutput
from tests.support.engines import (
    ALLERGEN,
    Allergic,
    RememberingModel,
    add,
    assert_all_free,
    assert_answered,
    build,
    continuation,
    end_of,
    greedy,
    nan_model,
    one_hot,
    run,
    tokens_of,
)
from tests.support.pools import assert_consistent, caching

CHUNK = 8
SHARED = [(5 * i + 1) % 250 for i in range(CHUNK)]  # a chunk, two blocks


def engine_of(model: Any = None, **options: Any) -> Engine:
    return build(
        "phase8_prefix",
        model,
        **{"prefill_chunk_size": CHUNK, "block_size": 4, "num_blocks": 60, "max_batch_size": 6} | options,
    )


def sick_prompt() -> list[int]:
    """Return a prompt whose second chunk has the allergen, so that it fails or gives NaN."""
    return [*SHARED, 7, 7, ALLERGEN, *[7] * (2 * CHUNK)]


def assert_sound(engine: Engine, outputs: list[StepOutput], neighbours: list[Request]) -> None:
    assert_answered(outputs, neighbours)
    assert_consistent(caching(engine))
    assert_all_free(engine)
    assert caching(engine).allocator.num_free == 60


@pytest.mark.parametrize("mixed", [True, False])
def test_a_pass_fails_after_its_first_chunk_was_shared(mixed: bool) -> None:
    engine = engine_of(Allergic(), mixed_batches=mixed, prefill_token_budget=2 * CHUNK)
    victim = add(engine, sick_prompt(), greedy(4))
    outputs = engine.step()
    friend = add(engine, [*SHARED, 1, 2, 3], greedy(6))
    outputs += engine.step()
    assert str(end_of(outputs, victim).error) == "allergic"
    assert friend.cached_tokens == CHUNK
    assert len(tokens_of(outputs, friend)) == 1, "computed beside the one that failed, or after it"
    outputs += run(engine)
    again = add(engine, sick_prompt()[: CHUNK + 2], greedy(3))
    outputs += run(engine)
    assert again.cached_tokens == CHUNK, "chunk 1 was sound; of chunk 2 nothing was registered"
    assert engine.telemetry.counters.reclaimed_slots == 0
    assert_sound(engine, outputs, [friend, again])


@pytest.mark.parametrize("mixed", [True, False])
def test_a_nan_in_chunk_2_is_not_registered(mixed: bool) -> None:
    """Only the last chunk has logits to check, so the written keys and values of every chunk are checked."""
    model = nan_model()
    engine = engine_of(model, mixed_batches=mixed)
    sick = add(engine, sick_prompt(), greedy(4))
    outputs = engine.step() + engine.step()
    assert (sick.state, sick.prefill_progress) == (RequestState.PREFILL, 2 * CHUNK)
    assert caching(engine).k[0].isnan().any()
    friend = add(engine, [*SHARED, 7, 7, 8, 9, 10], greedy(8, ignore_eos=True))
    outputs += run(engine)
    assert isinstance(end_of(outputs, sick).error, NaNLogitsError)
    assert friend.cached_tokens == CHUNK
    twin = add(engine, sick_prompt(), greedy(4))
    outputs += run(engine)
    assert twin.cached_tokens == CHUNK, "the sound part of it"
    assert isinstance(end_of(outputs, twin).error, NaNLogitsError), "its own prompt's doing"
    assert_answered(outputs, [friend], model)
    assert_consistent(caching(engine))
    assert_all_free(engine)


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_nan_among_the_logits_registers_no_answer(when: str) -> None:
    """The keys are finite, but the logits are NaN. Tokens sampled from them stay out of the tree."""

    def rule(token_ids: list[int]) -> Any:
        limit = len(SHARED) if when == "prefill" else len(SHARED) + 6
        return one_hot(0, math.nan) if len(token_ids) >= limit else continuation(token_ids, 1)[0]

    engine = engine_of(RememberingModel(rule=rule))
    sick = add(engine, SHARED, greedy(9))
    outputs = run(engine)
    assert isinstance(end_of(outputs, sick).error, NaNLogitsError)
    assert len(list(caching(engine).tree.walk())) == 2 + (when == "decode")
    assert_consistent(caching(engine))
    assert_all_free(engine)


@pytest.mark.parametrize("state", [RequestState.PREFILL, RequestState.DECODE])
def test_a_cancellation_while_another_uses_the_prefix(state: RequestState) -> None:
    engine = engine_of(RememberingModel(), prefill_token_budget=2 * CHUNK)
    first = add(engine, [*SHARED, *SHARED, *SHARED], greedy(9))
    outputs = engine.step()
    friend = add(engine, [*SHARED, 1, 2, 3], greedy(9))
    while first.state is not state or friend.slot is None:
        outputs += engine.step()
    assert friend.cached_tokens == CHUNK
    engine.cancel(first.request_id)
    outputs += engine.step()
    assert first.slot is None
    assert_consistent(caching(engine))
    outputs += run(engine)
    heir = add(engine, [*SHARED, 1, 2, 4], greedy(3))
    outputs += run(engine)
    assert heir.cached_tokens == CHUNK
    assert_sound(engine, outputs, [friend, heir])


class Unreadable:
    """A layer's store whose check runs out of memory."""

    def __getitem__(self, _: object) -> None:
        raise torch.OutOfMemoryError("a little too much")


@pytest.mark.parametrize("phase", ["phase8_prefix", "phase9_pipelined"])
@pytest.mark.parametrize("when", ["commit", "release"])
def test_out_of_memory_in_the_check_for_nan_leaves_a_prefix_unshared(
    phase: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(phase, block_size=4, num_blocks=60, prefill_chunk_size=CHUNK)
    pool = caching(engine)
    register, (keys, values) = pool.register_prefix, (pool.k, pool.v)

    def blindly(request: Request, columns: int) -> None:
        if (when == "release") == request.is_terminal:
            pool.k, pool.v = [Unreadable()], [Unreadable()]  # type: ignore[list-item]
        register(request, columns)
        pool.k, pool.v = keys, values

    with monkeypatch.context() as patch:
        patch.setattr(pool, "register_prefix", blindly)
        unlucky = add(engine, [*SHARED, 1, 2], greedy(9))
        outputs = run(engine)
    assert engine.dead is None
    # The prompt's two blocks are registered when they are computed, and all four when the request ends.
    assert len(list(pool.tree.walk())) == (2 if when == "release" else 4)
    heir = add(engine, [*SHARED, 1, 3], greedy(9))
    outputs += run(engine)
    assert heir.cached_tokens == CHUNK
    assert_sound(engine, outputs, [unlucky, heir])
