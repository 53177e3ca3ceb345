"""The flat pass over block tables: addresses once a step, the same tokens from any table, failures contained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.attention
from common.errors import NaNLogitsError
from common.kv import KVView
from common.models.layers import CausalLM
from common.request import SamplingParams
from kernels.attention_layout import AttentionLayout
from phase6_paged.cache import PagedKVCachePool
from tests.engine_helpers import (
    ALLERGEN,
    Allergic,
    RememberingModel,
    Variant,
    add,
    assert_all_free,
    assert_answered,
    continuation,
    end_of,
    greedy,
    nan_model,
    run,
    tiny_model,
    tokens_of,
    windowed_model,
)
from tests.pools import assert_consistent, paged, shuffle_free_blocks


@pytest.fixture(scope="module")
def llama() -> CausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def windowed() -> CausalLM:
    return windowed_model()


# ---------------------------------------------------------------------- addresses


@pytest.mark.usefixtures("torch_kernels")
def test_addresses_are_built_once_a_pass_and_reused_by_every_layer(
    variant: Variant, windowed: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each window there is, whatever the number of layers; all layers of a window read the same tensor."""
    built: list[tuple[str, int | None]] = []
    gathered: dict[int | None, set[int]] = {}
    views: list[KVView] = []
    for name in ("_build_decode_groups", "_build_prefill_segments"):
        original = getattr(AttentionLayout, name)

        def counted(
            self: AttentionLayout, window: int | None, name: str = name, original: Any = original
        ) -> Any:
            built.append((name, window))
            return original(self, window)

        monkeypatch.setattr(AttentionLayout, name, counted)
    original_attend, original_init = KVView.attend, KVView.__init__

    def attend(self: KVView, layer: int, *args: Any, window: int | None, **kwargs: Any) -> Tensor:
        out = original_attend(self, layer, *args, window=window, **kwargs)
        if self.layout.num_single:
            gathered.setdefault(window, set()).add(id(self.layout.decode_groups(window)[0].addresses))
        return out

    def init(self: KVView, *args: Any) -> None:
        views.append(self)
        original_init(self, *args)

    monkeypatch.setattr(KVView, "attend", attend)
    monkeypatch.setattr(KVView, "__init__", init)
    engine = variant.build(windowed, block_size=4, num_blocks=40)
    for n in (9, 3, 14):
        add(engine, [n] * n, greedy(8, ignore_eos=True))
    engine.step()
    assert sorted(built, key=str) == [("_build_prefill_segments", w) for w in (5, None)]
    assert len(views) == 1
    for _ in range(4):
        built.clear()
        gathered.clear()
        views.clear()
        engine.step()
        assert sorted(built, key=str) == [("_build_decode_groups", w) for w in (5, None)]
        assert {window: len(groups) for window, groups in gathered.items()} == {5: 1, None: 1}
        assert len(views) == 1


@pytest.mark.usefixtures("torch_kernels")
def test_a_decode_pass_gathers_through_the_table_and_reads_no_other_block(
    variant: Variant, llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Tensor] = []
    original = kernels.attention._decode

    def decode(q: Tensor, gathered: Tensor, group: Any, *rest: Any) -> Tensor:
        read.append(group.addresses)
        return original(q, gathered, group, *rest)

    monkeypatch.setattr(kernels.attention, "_decode", decode)
    engine = variant.build(llama, block_size=4, num_blocks=40)
    shuffle_free_blocks(paged(engine), seed=5)
    pool = paged(engine)
    requests = [add(engine, [n] * n, greedy(8, ignore_eos=True)) for n in (9, 3, 14)]
    engine.step()
    for _ in range(6):
        read.clear()
        engine.step()
        assert len(read) == len(llama.config.layers)
        assert all(addresses is read[0] for addresses in read)
        heads = llama.config.num_kv_heads
        by_head = read[0].view(heads, 3, -1)
        for head in range(heads):
            assert torch.equal(by_head[head], by_head[0] + head), "the same columns of every head"
        for own, request in zip(by_head[0] // heads, requests, strict=True):
            assert request.slot is not None
            table = pool.block_table(request.slot)
            length = pool.get_seq_len(request.slot)
            assert own[:length].tolist() == [table[c // 4] * 4 + c % 4 for c in range(length)]
            assert {int(address) // 4 for address in own} <= set(table), (
                "padding stays within the sequence's own blocks"
            )


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", ["remembering", "llama", "windowed"])
def test_shuffled_tables_give_the_same_tokens(
    variant: Variant, kind: str, block_size: int, request: Any
) -> None:
    """Blocks lie in another random order in every step."""
    model = RememberingModel() if kind == "remembering" else request.getfixturevalue(kind)
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in (1, 15, 16, 17, 40)]
    params: SamplingParams = greedy(20, ignore_eos=True)
    engine = variant.build(model, block_size=block_size, num_blocks=6 + 180 // block_size, max_batch_size=5)
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


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_prompts_that_end_at_a_blocks_edge(
    variant: Variant, llama: CausalLM, block_size: int, offset: int
) -> None:
    engine = variant.build(llama, block_size=block_size, num_blocks=40 + 160 // block_size, max_seq_len=96)
    prompts = [[n % 250] * (n * block_size + offset) for n in (1, 2, 3) if n * block_size + offset]
    requests = [add(engine, prompt, greedy(2 * block_size + 2, ignore_eos=True)) for prompt in prompts]
    assert_answered(run(engine), requests, llama)
    assert_all_free(engine)


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("planted", [1, 3])
def test_after_a_failed_pass_a_leak_is_reclaimed_and_counted(variant: Variant, planted: int) -> None:
    engine = variant.build(Allergic(), block_size=2, num_blocks=30)
    pool = paged(engine)
    runs, fails = add(engine, [1] * 5, greedy(6)), add(engine, [ALLERGEN] * 5, greedy(6))
    pool.allocator.allocate(planted, owner=-1)
    outputs = engine.step()
    assert isinstance(end_of(outputs, fails).error, RuntimeError)
    counters = engine.telemetry.counters
    assert counters.failed_passes == 2, "the pass of both, and of the guilty one alone"
    assert counters.reclaimed_slots == planted
    assert engine.telemetry.snapshot()["counters"]["reclaimed_slots"] == planted
    assert pool.audit_blocks() == set()
    assert_answered(outputs + run(engine), [runs])
    assert (pool.allocator.num_free, counters.reclaimed_slots) == (30, planted)
    assert_consistent(pool)


def test_without_a_failure_nobody_audits(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    def audit(*_: object) -> int:
        raise AssertionError("audited in health: it costs a walk over all tables")

    monkeypatch.setattr(PagedKVCachePool, "audit", audit)
    engine = variant.build(block_size=2, num_blocks=12)
    add(engine, [1] * 4, greedy(5))
    run(engine)


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_failed_pass_costs_the_guilty_only_and_their_blocks_return(variant: Variant, when: str) -> None:
    model = Allergic()
    engine = variant.build(model, block_size=2, num_blocks=40)
    prompt = [ALLERGEN, 1, 2] if when == "prefill" else [5, 1, 2]
    if when == "decode":  # the token after the third makes the pass fail that takes it in
        model.rule = lambda ids: ALLERGEN if ids[0] == 5 and len(ids) == 6 else continuation(ids, 1)[0]
    fails = add(engine, prompt, greedy(9))
    others = [add(engine, [i + 10] * 5, greedy(9)) for i in range(3)]
    outputs = run(engine)
    assert str(end_of(outputs, fails).error) == "allergic"
    assert len(tokens_of(outputs, fails)) == (0 if when == "prefill" else 4)
    assert_answered(outputs, others)
    assert_all_free(engine)
    assert_consistent(paged(engine))


def test_the_blocks_of_a_nan_request_do_no_harm_to_the_next_who_gets_them(variant: Variant) -> None:
    model = nan_model()
    engine = variant.build(model, block_size=4, num_blocks=12, max_batch_size=2)
    pool = paged(engine)
    neighbour, sick = (
        add(engine, list(range(20, 30)), greedy(14, ignore_eos=True)),
        add(engine, [1, 2, 3, ALLERGEN, *range(4, 12)], greedy(8)),
    )
    outputs = engine.step()
    assert isinstance(end_of(outputs, sick).error, NaNLogitsError)
    assert sick.slot is not None
    tainted = set(pool.block_table(sick.slot))
    assert any(layer[list(tainted)].isnan().any() for layer in (*pool.k, *pool.v))
    # One who decodes beside a longer neighbour must not read past its own end, in the blocks of the sick.
    heir = add(engine, [7, 8], greedy(14, ignore_eos=True))
    outputs += engine.step()
    assert heir.slot is not None
    inherited = list(set(pool.block_table(heir.slot)) & tainted)
    assert any(layer[inherited].isnan().any() for layer in (*pool.k, *pool.v)), "handed on as they are"
    assert_answered(outputs + run(engine), [neighbour, heir], model)
    assert_all_free(engine)


def test_two_engines_give_the_same(variant: Variant, llama: CausalLM) -> None:
    """Unseeded sampled requests too, through preemptions."""
    told = []
    for _ in range(2):
        engine = variant.build(llama, block_size=2, num_blocks=16, seed=7)
        requests = [
            add(engine, [i + 1] * 5, SamplingParams(temperature=1.5, max_new_tokens=15)) for i in range(5)
        ]
        outputs = run(engine)
        assert engine.scheduler.preemptions > 0
        told.append([tokens_of(outputs, r) for r in requests])
    assert told[0] == told[1]
