"""What a step computes while a long prompt is chunked, as the model sees it, and what the cache then holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.models.layers import CausalLM
from common.request import RequestState, SamplingParams, StepOutput
from tests.engine_helpers import (
    Call,
    RememberingModel,
    Variant,
    add,
    assert_all_free,
    assert_answered,
    greedy,
    run,
    tiny_model,
)

BACKENDS: list[dict[str, Any]] = [{"block_size": 16}, {"block_size": 1}, {"kv_cache_backend": "contiguous"}]


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = request.param
    return chosen


@pytest.fixture(scope="module")
def long_llama() -> CausalLM:
    return tiny_model(max_position_embeddings=4096)


def long_memory() -> RememberingModel:
    model = RememberingModel()
    model.max_positions = 4096
    return model


def pass_lengths(calls: list[Call]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(call.query_lengths, call.kv_lengths) for call in calls]


# ---------------------------------------------------------------------- the trace of a long prompt


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("kind", ["remembering", "llama"])
def test_a_prompt_of_2048_among_six_who_decode(
    variant: Variant, kind: str, mixed: bool, long_llama: CausalLM, backend: dict[str, Any]
) -> None:
    """Four steps of 512, everybody else's token in each of them, and the first token with the fourth."""
    if kind == "llama" and backend.get("block_size") == 1:
        pytest.skip("the trace does not depend on the block size")
    model: Any = long_memory() if kind == "remembering" else long_llama
    params: SamplingParams = greedy(40, ignore_eos=True)
    engine = variant.build(
        model,
        max_seq_len=2304,
        max_batch_size=8,
        prefill_chunk_size=512,
        mixed_batches=mixed,
        **backend,
    )
    decoders = [add(engine, [(11 * i + j) % 250 for j in range(4 + i)], params) for i in range(6)]
    outputs = [o for _ in range(8) for o in engine.step()]
    assert all(r.state is RequestState.DECODE for r in decoders)
    lengths = [len(r.token_ids) for r in decoders]
    prompt = [(13 * i + i // 7) % 250 for i in range(2048)]
    long = add(engine, prompt, greedy(12, ignore_eos=True))
    if kind == "remembering":
        model.calls.clear()
    passes = engine.telemetry.counters.passes
    for chunk in range(4):
        told = engine.step()
        outputs += told
        own = [o.request_id for o in told]
        expected = [r.request_id for r in decoders] + [long.request_id] * (chunk == 3)
        assert own == expected, "one token for each who decodes; nothing for a chunk that is not the last"
        assert long.prefill_progress == engine.runner.pool.get_seq_len(long.slot or 0) == 512 * (chunk + 1)
        record = engine.telemetry.records[-1]
        assert (record.prefill_tokens, record.decode_tokens, record.padded_tokens) == (512, 6, 0)
        assert engine.has_work
    assert engine.telemetry.counters.passes - passes == (4 if mixed else 8)
    if kind == "remembering":
        decode = [tuple(n + chunk for n in lengths) for chunk in range(4)]
        chunks = [(512, 512 * (chunk + 1)) for chunk in range(4)]
        if mixed:
            trace = [
                ((1,) * 6 + (size,), (*columns, end))
                for columns, (size, end) in zip(decode, chunks, strict=True)
            ]
        else:
            trace = []
            for columns, (size, end) in zip(decode, chunks, strict=True):
                trace += [((1,) * 6, columns), ((size,), (end,))]
        assert pass_lengths(model.calls) == trace
        rows = [call.logit_rows for call in model.calls]
        last = [0, 1, 2, 3, 4, 5]
        if mixed:
            assert rows == [last, last, last, [*last, 6 + 511]]
        else:
            assert rows == [last, [0], last, [0], last, [0], last, [511]], "a pass always names a row"
    assert_answered(outputs + run(engine), [*decoders, long], model)
    assert_all_free(engine)


@pytest.mark.parametrize(("chunk", "steps"), [(128, 16), (256, 8), (512, 4), (1024, 2), (2048, 1), (4000, 1)])
def test_steps_until_the_first_token_of_2048(variant: Variant, chunk: int, steps: int) -> None:
    engine = variant.build(long_memory(), max_seq_len=2304, prefill_chunk_size=chunk)
    add(engine, [i % 250 for i in range(2048)], greedy(2))
    taken = 0
    told: list[StepOutput] = []
    while not told:
        told = engine.step()
        taken += 1
    assert taken == steps


# ---------------------------------------------------------------------- after every chunk


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize(("budget", "chunks"), [(7, None), (14, None), (None, None), (None, 2)])
def test_the_cache_holds_what_progress_says_after_every_step(
    variant: Variant, backend: dict[str, Any], budget: int | None, chunks: int | None, mixed: bool
) -> None:
    engine = variant.build(
        prefill_chunk_size=7,
        prefill_token_budget=budget,
        max_prefill_chunks_per_step=chunks,
        mixed_batches=mixed,
        max_batch_size=5,
        **backend,
    )
    pool = engine.runner.pool
    requests = [add(engine, [i + 1] * n, greedy(8)) for i, n in enumerate((1, 6, 7, 8, 22, 30, 50))]
    outputs: list[StepOutput] = []
    chunk_ends: dict[str, list[int]] = {r.request_id: [] for r in requests}
    while engine.has_work:
        before = {r.request_id: r.prefill_progress for r in requests}
        outputs += engine.step()
        for own in requests:
            if own.slot is None or own.is_terminal:
                continue
            assert pool.get_seq_len(own.slot) == own.prefill_progress
            if own.state is RequestState.PREFILL:
                assert own.prefill_progress < len(own.token_ids)
                assert own.num_generated_tokens == 0
            else:
                assert own.prefill_progress == len(own.token_ids) - 1
            if own.prefill_progress != before[own.request_id] <= own.num_prompt_tokens - 1:
                chunk_ends[own.request_id].append(own.prefill_progress)
    for own in requests:
        n = own.num_prompt_tokens
        ends = chunk_ends[own.request_id]
        assert 1 <= ends[0] <= min(7, n), "the first chunk may be cut to what others leave of the budget"
        assert ends == [*range(ends[0], n, 7), n], "and no later one is: those who have begun come first"
        assert budget is not None or ends[0] == min(7, n), "nor is any where there is no budget"
    assert_answered(outputs, requests)
    assert_all_free(engine)


def test_a_short_prompt_that_comes_alone_costs_nothing(variant: Variant) -> None:
    """Up to a chunk, with no other prompt beside it, the passes are those of phase 6."""
    traces = []
    for chosen, options in (
        (Variant("phase6_paged"), {}),
        (variant, {"mixed_batches": False, "prefill_chunk_size": 20}),
    ):
        model = RememberingModel()
        engine = chosen.build(model, **options)
        for i in range(4):
            add(engine, [i + 1] * 20, greedy(5 + i))
            engine.step()
        run(engine)
        traces.append(model.calls)
    assert traces[0] == traces[1]


def test_all_pending_chunks_go_in_one_pass_each_at_its_own_progress(variant: Variant) -> None:
    model = RememberingModel()
    engine = variant.build(model, prefill_chunk_size=8, prefill_token_budget=None)
    add(engine, [1] * 20, greedy(4))
    engine.step()
    add(engine, [2] * 12, greedy(4))
    engine.step()
    add(engine, [3] * 5, greedy(4))
    engine.step()
    engine.step()
    assert pass_lengths(model.calls) == [
        ((8,), (8,)),
        ((8, 8), (16, 8)),
        ((4, 4, 5), (20, 12, 5)),
        ((1, 1, 1), (21, 13, 6)),
    ]
    assert [call.logit_rows for call in model.calls] == [[0], [0], [3, 7, 12], [0, 1, 2]]
    assert engine.telemetry.counters.padded_tokens == 0


def test_chunks_beyond_a_passs_tokens_follow_in_passes_of_their_own(variant: Variant) -> None:
    """Decode goes along with the first of them; the step is still one."""
    model = RememberingModel()
    engine = variant.build(
        model,
        prefill_chunk_size=8,
        prefill_token_budget=None,
        max_prefill_pass_tokens=16,
        max_batch_size=5,
    )
    first = add(engine, [1] * 5, greedy(6))
    outputs = engine.step()
    model.calls.clear()
    others = [add(engine, [i + 2] * n, greedy(6)) for i, n in enumerate((20, 8, 8, 3))]
    told = engine.step()
    assert pass_lengths(model.calls) == [((1, 8, 8), (6, 8, 8)), ((8, 3), (8, 3))]
    assert [o.request_id for o in told] == [r.request_id for r in (first, *others[1:])]
    assert_answered(outputs + told + run(engine), [first, *others])
    assert_all_free(engine)


@pytest.mark.parametrize("mixed", [True, False])
def test_a_chunk_of_one_token_behind_a_longer_one(variant: Variant, mixed: bool) -> None:
    """Rows of one query count as leading only where they lead."""
    engine = variant.build(
        tiny_model(),
        prefill_chunk_size=8,
        prefill_token_budget=None,
        mixed_batches=mixed,
    )
    model = engine.runner.model
    sizes = (9, 16, 1, 17, 2)
    requests = [
        add(engine, [(7 * i + j) % 250 for j in range(n)], greedy(12, ignore_eos=True))
        for i, n in enumerate(sizes)
    ]
    assert_answered(run(engine), requests, model)


@pytest.mark.parametrize(
    ("budget", "chunks", "most"), [(5, None, 5), (12, None, 12), (None, 2, 10), (None, None, 30)]
)
def test_a_steps_work_is_bounded(variant: Variant, budget: int | None, chunks: int | None, most: int) -> None:
    model = RememberingModel()
    engine = variant.build(
        model,
        prefill_chunk_size=5,
        prefill_token_budget=budget,
        max_prefill_chunks_per_step=chunks,
        max_batch_size=6,
    )
    requests = [add(engine, [i + 1] * (1 + 9 * i % 40), greedy(9)) for i in range(14)]
    while engine.has_work:
        decoding = sum(r.state is RequestState.DECODE for r in requests)
        model.calls.clear()
        engine.step()
        assert len(model.calls) <= 1, "mixed: one pass a step"
        assert sum(call.tokens for call in model.calls) <= most + decoding


def test_what_is_cached_in_chunks_is_what_is_cached_at_once(
    variant: Variant, backend: dict[str, Any]
) -> None:
    """Keys and values of every layer and column, up to float32 rounding."""
    model = tiny_model()
    prompt = [(17 * i + 3) % 250 for i in range(50)]
    stores = []
    for size in (512, 7):
        engine = variant.build(model, prefill_chunk_size=size, **backend)
        request = add(engine, prompt, greedy(3))
        while request.state is not RequestState.DECODE:
            engine.step()
        pool = engine.runner.pool
        assert request.slot is not None
        table, block = pool.block_table(request.slot), pool.block_size
        rows = torch.tensor([table[c // block] * block + c % block for c in range(50)])
        stores.append([layer.flatten(0, 1)[rows] for layer in (*pool.k, *pool.v)])
    for whole, chunked in zip(*stores, strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)
        assert whole.abs().amax(dim=(1, 2)).min() > 0, "every column is written"
