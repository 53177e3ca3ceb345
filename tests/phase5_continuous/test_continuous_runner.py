"""Decode first, then all new prompts in one pass without padding."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from common.kv import KVView
from common.models.layers import CausalLM
from kernels.attention_layout import AttentionLayout
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
def test_newcomers_prompts_are_cut_into_passes_of_so_many_tokens(
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


@pytest.mark.usefixtures("torch_kernels")
def test_decode_does_no_work_per_sequence_in_the_layers(
    variant: Variant, llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`attend` is called once a layer, its index tensors are built once a pass, and a decode step of eight
    sequences has as many operations as one of two."""
    attended: list[int] = []
    built: list[Any] = []
    attend, build_group = KVView.attend, AttentionLayout._build_decode_groups

    def counted_attend(self: KVView, layer: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        attended.append(layer)
        return attend(self, layer, *args, **kwargs)

    def counted_build(self: AttentionLayout, window: int | None) -> Any:
        built.append(window)
        return build_group(self, window)

    monkeypatch.setattr(KVView, "attend", counted_attend)
    monkeypatch.setattr(AttentionLayout, "_build_decode_groups", counted_build)
    operations: dict[int, Counter[str]] = {}
    for count in (2, 8):
        engine = variant.build(llama, max_batch_size=8)
        for i in range(count):
            add(engine, [i + 1] * (i + 2), greedy(5, ignore_eos=True))
        engine.step()
        attended.clear()
        built.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.step()
        assert attended == list(range(len(llama.config.layers)))
        assert built == [None]
        operations[count] = Counter({event.key: event.count for event in profile.key_averages()})
    # A few operations may differ, but a loop over sequences would add six a layer.
    extra = sum((operations[8] - operations[2]).values())
    assert extra < 6, operations[8] - operations[2]
