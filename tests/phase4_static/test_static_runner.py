"""The rectangle: padded prompts, idle rows, and every member's tokens as if it were alone."""

from __future__ import annotations

import math

import pytest

from common.models.layers import CausalLM
from phase4_static.cache import StaticKVCache
from tests.support.engines import (
    EOS,
    RememberingModel,
    add,
    assert_all_free,
    assert_answered,
    build,
    continuation,
    end_of,
    greedy,
    run,
    tiny_model,
    tokens_of,
)


def test_one_pass_over_the_rectangle_then_one_column_a_step() -> None:
    model = RememberingModel()
    engine = build("static", model)
    for prompt in (b"abc", b"abcdefg", b"abcde"):
        add(engine, prompt, greedy(3))
    run(engine)
    prefill, *decode = model.calls
    assert (prefill.tokens, prefill.query_lengths) == (3 * 7, (7, 7, 7))
    assert prefill.logit_rows == [2, 7 + 6, 14 + 4], "only each row's last real token has logits"
    assert [call.query_lengths for call in decode] == [(1, 1, 1)] * 2
    assert [call.kv_lengths for call in decode] == [(4, 8, 6), (5, 9, 7)], "rows count their own columns"


def test_a_nan_in_the_embedding_of_a_token_reaches_no_prompt_without_that_token() -> None:
    """Masked columns are multiplied by 0, and 0 × NaN is NaN. So padding must use only tokens of the prompts."""
    model = tiny_model()
    for token in range(250):
        if token not in (*b"abcdefg", *b"xyz"):
            model.embed_tokens.weight.data[token] = math.nan
    engine = build("static", model)
    requests = [add(engine, prompt, greedy(1)) for prompt in (b"xyz", b"abcdefg")]
    outputs = run(engine)
    assert_answered(outputs, requests, model)


def test_eos_of_one_row_leaves_the_others_running() -> None:
    def rule(token_ids: list[int]) -> int:
        return EOS if token_ids[0] == ord("!") and len(token_ids) == 4 else continuation(token_ids, 1)[0]

    engine = build("static", RememberingModel(rule=rule))
    stops, goes = add(engine, b"!!", greedy(9)), add(engine, b"go", greedy(9))
    outputs = run(engine)
    assert end_of(outputs, stops).finish_reason == "eos"
    assert len(tokens_of(outputs, stops)) == 3
    assert tokens_of(outputs, goes) == continuation(b"go", 9)
    assert [record.idle_rows for record in engine.telemetry.records] == [0] * 3 + [1] * 6 + [0]


@pytest.mark.parametrize("kind", ["remembering", "llama"])
def test_idle_rows_never_overflow(kind: str, llama: CausalLM) -> None:
    """Prompts of 400 and 10 tokens have 9 and 400 new ones, so the first row is idle for 391 steps."""
    model = RememberingModel() if kind == "remembering" else llama
    engine = build("static", model, max_seq_len=900)
    long, short = ([(3 * i) % 250 for i in range(n)] for n in (400, 10))
    requests = [
        add(engine, long, greedy(9, ignore_eos=True)),
        add(engine, short, greedy(400, ignore_eos=True)),
        add(engine, long, greedy(9, ignore_eos=True)),
    ]
    outputs = engine.step()
    pool = engine.runner.pool
    assert isinstance(pool, StaticKVCache)
    assert pool.block_size == 800
    while any(not request.is_terminal for request in requests[::2]):
        outputs += engine.step()
    # From here on the first and third rows are idle. None of their columns may change, except the last one.
    before = [layer[[0, 2]].clone() for layer in (*pool.k, *pool.v)]
    last = pool.get_seq_len(0) - 1
    while not requests[1].is_terminal:
        outputs += engine.step()
        assert pool.get_seq_len(0) == pool.get_seq_len(2) == last + 1
    for layer, canary in zip((*pool.k, *pool.v), before, strict=True):
        changed = (layer[[0, 2]] != canary).flatten(2).any(-1).any(0)
        assert set(changed.nonzero().flatten().tolist()) <= {last}
    assert_answered(outputs + run(engine), requests, model)


def test_an_idle_row_computes_its_last_column_again() -> None:
    model = RememberingModel()
    engine = build("static", model)
    done, runs = add(engine, b"ab", greedy(2)), add(engine, b"cd", greedy(4))
    for _ in range(3):
        engine.step()
    pool = engine.runner.pool
    assert done.is_terminal
    assert not runs.is_terminal
    assert model.calls[-1].logit_rows == [1], "an idle row is not sampled"
    computed = [token + 1 for token in (*b"ab", *continuation(b"ab", 1))]
    assert pool.k[0].view(2, -1)[0, :4].tolist() == [*computed, 0], "its last token is never computed"


@pytest.mark.parametrize("steps", [1, 3])
def test_a_cancelled_member_is_neither_sampled_nor_sent(steps: int, llama: CausalLM) -> None:
    engine = build("static", llama)
    leaves, stays = (add(engine, prompt, greedy(8, ignore_eos=True)) for prompt in ([1, 2, 3], [4, 5]))
    outputs = [o for _ in range(steps) for o in engine.step()]
    engine.cancel(leaves.request_id)
    later = run(engine)
    assert [o.finish_reason for o in later if o.request_id == leaves.request_id] == ["cancelled"]
    assert leaves.num_generated_tokens == steps
    assert_answered(outputs + later, [stays], llama)
    assert_all_free(engine)
