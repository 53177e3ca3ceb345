"""Passes over block tables: any table gives the same tokens, and leaks are reclaimed after a failure."""

from __future__ import annotations

import pytest

from common.models.config import LayerConfig, RopeConfig
from common.models.layers import CausalLM
from common.request import SamplingParams
from tests.support.engines import (
    RememberingModel,
    Variant,
    add,
    assert_all_free,
    assert_answered,
    greedy,
    tiny_model,
)
from tests.support.pools import assert_consistent, paged, shuffle_free_blocks


@pytest.fixture(scope="module")
def windowed() -> CausalLM:
    """A small Llama with sliding and full layers, like Gemma's."""
    local, full = LayerConfig(window=5, rope=RopeConfig(10_000.0)), LayerConfig(None, RopeConfig(50_000.0))
    return tiny_model(layers=(local, full, local, full))


@pytest.mark.parametrize(
    ("kind", "block_size"),
    [*(("remembering", size) for size in (1, 4, 16, 64)), ("windowed", 4), ("windowed", 64)],
)
def test_shuffled_tables_give_the_same_tokens(
    variant: Variant, kind: str, block_size: int, windowed: CausalLM
) -> None:
    """The free blocks are shuffled before every step. Prompts end before, at and after a block's edge."""
    model = RememberingModel() if kind == "remembering" else windowed
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in (1, 3, 4, 5, 15, 16, 17, 31, 32, 33)]
    params: SamplingParams = greedy(20, ignore_eos=True)
    engine = variant.build(model, block_size=block_size, num_blocks=10 + 360 // block_size, max_batch_size=10)
    requests = [add(engine, prompt, params) for prompt in prompts]
    outputs = []
    tables: list[list[int]] = []
    while engine.has_work:
        shuffle_free_blocks(paged(engine), seed=len(outputs))
        outputs += engine.step()
        tables += [list(t) for t in paged(engine)._tables.values()]
        assert_consistent(paged(engine))
    if block_size <= 4:
        assert any(t != sorted(t) and t != sorted(t)[::-1] for t in tables), "some table is out of order"
    assert_answered(outputs, requests, model)
    assert_all_free(engine)
