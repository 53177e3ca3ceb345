"""Which prompts advance, by how many tokens, and the memory that is left: with integers only, without a model."""

from __future__ import annotations

from typing import Any

import pytest

from common.request import RequestState
from tests.support.engines import Bench, Variant

CHUNK = 4
DECODE = RequestState.DECODE


def bench_of(
    variant: Variant,
    *,
    budget: int | None = CHUNK,
    chunks: int | None = None,
    num_blocks: int = 500,
    **options: Any,
) -> Bench:
    return variant.bench(
        num_blocks=num_blocks,
        block_size=1,
        prefill_chunk_size=CHUNK,
        max_prefill_chunks_per_step=chunks,
        prefill_token_budget=budget,
        **options,
    )


# ---------------------------------------------------------------------- chunks


def test_a_prompt_advances_a_chunk_a_step_and_then_decodes(variant: Variant) -> None:
    bench = bench_of(variant)
    (own,) = bench.add(10)
    assert bench.step() == ([], [("r0", 0, 4)])
    assert own.state is RequestState.PREFILL
    assert bench.step() == ([], [("r0", 4, 8)])
    assert bench.step() == ([], [("r0", 8, 10)])
    assert own.state is DECODE
    assert bench.step() == (["r0"], [])


@pytest.mark.parametrize(
    ("prompt", "ends"), [(1, [1]), (3, [3]), (4, [4]), (5, [4, 5]), (8, [4, 8]), (13, [4, 8, 12, 13])]
)
def test_chunks_at_their_boundaries(variant: Variant, prompt: int, ends: list[int]) -> None:
    bench = bench_of(variant)
    bench.add(prompt)
    seen = [bench.step()[1] for _ in range(len(ends))]
    assert seen == [[("r0", start, end)] for start, end in zip([0, *ends], ends, strict=False)]
    assert bench.step() == (["r0"], [])


def test_every_decoding_request_is_in_every_plan(variant: Variant) -> None:
    bench = bench_of(variant)
    bench.add(2, 3)
    for _ in range(2):
        bench.step()
    bench.add(40)
    for i in range(10):
        assert bench.step() == (["r0", "r1"], [("r2", 4 * i, 4 * i + 4)])
    assert bench.step() == (["r0", "r1", "r2"], [])


def test_blocks_for_the_whole_prompt_are_reserved_at_admission(variant: Variant) -> None:
    """The memory of an admitted request is reserved, even before its prompt begins."""
    bench = bench_of(variant, num_blocks=60)
    first, second, _ = bench.add(30, 20, 20)
    bench.step()
    assert first.prefill_progress == 4
    assert bench.pool.capacity(first.slot or 0) == 30
    assert second.slot is None, "80 % of 60, less 30 for the first, leave 18"
    bench = bench_of(variant, num_blocks=100)
    requests = bench.add(30, 30, 35)
    bench.step()
    assert [r.prefill_progress for r in requests] == [4, 0, 0]
    assert [r.slot is None for r in requests] == [False, False, True]
    assert bench.pool.free_token_capacity() == 40
    for step in range(7):
        bench.step()
        assert requests[1].prefill_progress == (0 if step < 6 else 2), (
            "what the first leaves of the last step"
        )
        assert requests[2].slot is None, "80 % of 40: what the second will need is not free"
    assert bench.pool.allocator.num_allocated == 60


# ---------------------------------------------------------------------- a budget of tokens


@pytest.mark.parametrize(("chunks", "expected"), [(1, 1), (2, 2), (3, 3), (None, 5), (9, 5)])
def test_as_many_prompts_advance_as_the_cap_allows(
    variant: Variant, chunks: int | None, expected: int
) -> None:
    bench = bench_of(variant, budget=None, chunks=chunks)
    bench.add(*[10] * 5)
    for step in range(2):
        assert bench.step() == ([], [(f"r{i}", 4 * step, 4 * step + 4) for i in range(expected)])


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_cap_counts_short_prompts_too(variant: Variant, chunks: int) -> None:
    bench = bench_of(variant, budget=None, chunks=chunks)
    bench.add(*[1] * 6)
    order = []
    for _ in range(6 // chunks):
        prefill = bench.step()[1]
        assert len(prefill) == chunks
        order += prefill
    assert order == [(f"r{i}", 0, 1) for i in range(6)]


def test_cap_and_budget_hold_together(variant: Variant) -> None:
    bench = bench_of(variant, budget=6, chunks=2)
    bench.add(2, 2, 9, 9)
    assert bench.step()[1] == [("r0", 0, 2), ("r1", 0, 2)], "the cap, with tokens left"
    assert bench.step()[1] == [("r2", 0, 4), ("r3", 0, 2)], "the budget, which cuts the last one"
    assert bench.step()[1] == [("r2", 4, 8), ("r3", 2, 4)]


@pytest.mark.parametrize("budget", [3, CHUNK, 2 * CHUNK, 10, None])
def test_the_work_of_a_step_is_bounded_and_its_budget_is_used(variant: Variant, budget: int | None) -> None:
    bench = bench_of(variant, budget=budget, max_batch_size=6)
    requests = bench.add(30, 2, 17, 9, 1, 25)
    for _ in range(30):
        left = sum(
            min(CHUNK, len(r.token_ids) - r.prefill_progress) for r in requests if r.state is not DECODE
        )
        most = left if budget is None else min(budget, left)
        computed = [end - start for _, start, end in bench.step()[1]]
        assert sum(computed) == most
        assert all(1 <= tokens <= CHUNK for tokens in computed)


# ---------------------------------------------------------------------- which prompt goes first


def test_prompts_that_have_begun_advance_before_new_prompts(variant: Variant) -> None:
    bench = bench_of(variant, budget=2 * CHUNK)
    first, second, _, fourth = bench.add(6, 20, 6, 6)
    assert [c[0] for c in bench.step()[1]] == ["r0", "r1"]
    assert bench.step()[1] == [("r0", 4, 6), ("r1", 4, 8), ("r2", 0, 2)]
    # Even a new request with an earlier arrival waits for prompts that have begun.
    fourth.arrival = -1
    assert bench.step() == (["r0"], [("r1", 8, 12), ("r2", 2, 6)])
    assert bench.step()[1] == [("r1", 12, 16), ("r3", 0, 4)]
    assert bench.step()[1] == [("r3", 4, 6), ("r1", 16, 20)]
    assert first.state is second.state is DECODE


# ---------------------------------------------------------------------- preemption


def test_a_request_that_is_preempted_between_chunks_begins_again(variant: Variant) -> None:
    bench = bench_of(variant, num_blocks=24)
    (old,) = bench.add(2)
    for _ in range(2):
        bench.step()
    (young,) = bench.add(12)
    while young.prefill_progress < 8:
        bench.step()
    assert young.state is RequestState.PREFILL
    old.token_ids += [1] * (24 - 11 - len(old.token_ids))  # the oldest takes one column too many
    bench.make_room()
    assert (young.state, young.slot, young.prefill_progress) == (RequestState.WAITING, None, 0)
    assert bench.scheduler.waiting[0] is young
    assert bench.scheduler.preemptions == 1
    old.finish("length")
    assert bench.step()[1] == [("r1", 0, 4)]


def test_a_decoding_request_that_is_preempted_prefills_all_its_tokens_in_chunks(variant: Variant) -> None:
    bench = bench_of(variant, num_blocks=14)
    old, young = bench.add(2, 3)
    while not bench.scheduler.preemptions:
        bench.step()
    total = len(young.token_ids)
    assert total > 3
    old.finish("length")
    chunks = []
    while young.state is not DECODE:
        chunks += bench.step()[1]
    assert chunks == [("r1", s, min(s + CHUNK, total)) for s in range(0, total, CHUNK)]
