"""The passes of steps while a long prompt is chunked, and the contents of the cache after them."""

from __future__ import annotations

from typing import Any

import pytest

from common.request import RequestState
from tests.support.engines import Call, RememberingModel, Variant, add, assert_served, greedy, run

BACKENDS: list[dict[str, Any]] = [{"block_size": 16}, {"block_size": 1}, {"kv_cache_backend": "contiguous"}]


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = request.param
    return chosen


def pass_lengths(calls: list[Call]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(call.query_lengths, call.kv_lengths) for call in calls]


# ---------------------------------------------------------------------- the trace of a long prompt


@pytest.mark.parametrize("mixed", [True, False])
def test_a_prompt_of_2048_beside_six_decoding_requests(
    variant: Variant, mixed: bool, backend: dict[str, Any]
) -> None:
    """The prompt takes four steps of 512 tokens. The fourth gives its first token. The others get one in each."""
    model = RememberingModel()
    model.max_positions = 4096
    engine = variant.build(
        model, max_seq_len=2304, max_batch_size=8, prefill_chunk_size=512, mixed_batches=mixed, **backend
    )
    decoders = [add(engine, [(11 * i + j) % 250 for j in range(4 + i)], greedy(40)) for i in range(6)]
    outputs = [o for _ in range(8) for o in engine.step()]
    assert all(r.state is RequestState.DECODE for r in decoders)
    lengths = [len(r.token_ids) for r in decoders]
    prompt = [(13 * i + i // 7) % 250 for i in range(2048)]
    long = add(engine, prompt, greedy(12))
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
    decode = [tuple(n + chunk for n in lengths) for chunk in range(4)]
    chunks = [(512, 512 * (chunk + 1)) for chunk in range(4)]
    if mixed:
        trace = [
            ((1,) * 6 + (size,), (*columns, end)) for columns, (size, end) in zip(decode, chunks, strict=True)
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
    assert_served(engine, [*decoders, long], outputs)


# ---------------------------------------------------------------------- after every chunk


def test_a_short_prompt_alone_is_computed_as_in_phase_6(variant: Variant) -> None:
    """A prompt of up to a chunk without another prompt beside it has the passes of phase 6."""
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


def test_chunks_beyond_the_size_of_a_pass_follow_in_passes_of_their_own(variant: Variant) -> None:
    """Decode runs in the first pass of the step. All passes belong to one step."""
    model = RememberingModel()
    engine = variant.build(
        model, prefill_chunk_size=8, prefill_token_budget=None, max_prefill_pass_tokens=16, max_batch_size=5
    )
    first = add(engine, [1] * 5, greedy(6))
    outputs = engine.step()
    model.calls.clear()
    others = [add(engine, [i + 2] * n, greedy(6)) for i, n in enumerate((20, 8, 8, 3))]
    told = engine.step()
    assert pass_lengths(model.calls) == [((1, 8, 8), (6, 8, 8)), ((8, 3), (8, 3))]
    assert [o.request_id for o in told] == [r.request_id for r in (first, *others[1:])]
    assert_served(engine, [first, *others], outputs + told)
