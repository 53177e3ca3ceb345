"""Decode first, then all new prompts in one pass without padding."""

from __future__ import annotations

import pytest

from tests.support.engines import (
    RememberingModel,
    Variant,
    add,
    assert_answered,
    greedy,
    run,
)


@pytest.mark.parametrize(
    ("most", "passes"),
    [
        (8192, [(3, 7, 1, 2, 2)]),
        (15, [(3, 7, 1, 2, 2)]),
        (14, [(3, 7, 1, 2), (2,)]),
        (10, [(3, 7), (1, 2, 2)]),
        (9, [(3,), (7, 1), (2, 2)]),
        (4, [(3,), (7,), (1, 2), (2,)]),  # a longer prompt has a pass of its own
        (1, [(3,), (7,), (1,), (2,), (2,)]),
    ],
)
def test_new_prompts_are_divided_into_passes_of_bounded_size(
    variant: Variant, most: int, passes: list[tuple[int, ...]]
) -> None:
    """The bound cuts prompts into passes, not steps: all first tokens come in the first step."""
    model = RememberingModel()
    engine = variant.build(model, max_prefill_pass_tokens=most, max_batch_size=5)
    prompts = (b"abc", b"abcdefg", b"a", b"hi", b"yo")
    requests = [add(engine, prompt, greedy(4)) for prompt in prompts]
    outputs = engine.step()
    assert [call.query_lengths for call in model.calls] == passes
    assert [o.request_id for o in outputs] == [r.request_id for r in requests]
    assert_answered(outputs + run(engine), requests)


def test_a_mixed_step_decodes_first(variant: Variant) -> None:
    model = RememberingModel()
    engine = variant.build(model)
    a, b = add(engine, b"aa", greedy(6)), add(engine, b"bbb", greedy(6))
    outputs = engine.step()
    c = add(engine, b"cccc", greedy(6))
    step = engine.step()
    assert [o.request_id for o in step] == [a.request_id, b.request_id, c.request_id]
    assert [(call.query_lengths, call.kv_lengths) for call in model.calls[1:]] == [
        ((1, 1), (3, 4)),
        ((4,), (4,)),
    ]
    assert_answered(outputs + step + run(engine), [a, b, c])
