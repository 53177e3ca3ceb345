"""Whose prompt advances, by how much, and what that leaves the others: integers only, no model."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from common.request import Request, RequestState
from common.scheduling import StepPlan
from phase6_paged.cache import PagedKVCachePool
from phase7_chunked import Config, Scheduler
from tests.engine_helpers import CPU, Clock, make_room
from tests.phase6_paged.support import SMALLEST, assert_consistent, request

CHUNK = 4
DECODE = RequestState.DECODE


class Bench:
    """A scheduler and its pool, stepped without a runner: every pass succeeds and every token is a 1."""

    def __init__(
        self,
        *,
        budget: int | None = CHUNK,
        chunks: int | None = None,
        num_blocks: int = 500,
        size: int = 8,
        **options: Any,
    ) -> None:
        config = Config(
            max_batch_size=size,
            max_seq_len=4096,
            num_blocks=num_blocks,
            block_size=1,
            prefill_chunk_size=CHUNK,
            max_prefill_chunks_per_step=chunks,
            prefill_token_budget=budget,
            **options,
        )
        self.scheduler = Scheduler(config, Clock())
        self.pool = PagedKVCachePool(config, SMALLEST, CPU)
        self.arrivals = 0

    def add(self, *prompts: int) -> list[Request]:
        requests = [request(n, 64, f"r{self.arrivals + i}") for i, n in enumerate(prompts)]
        for each in requests:
            each.arrival = self.arrivals
            self.arrivals += 1
            assert self.scheduler.add_request(each)
        return requests

    def plan(self) -> StepPlan:
        for done in self.scheduler.retire():
            self.pool.release(done)
        make_room(self.scheduler, self.pool)
        self.scheduler.admit(self.pool)
        return self.scheduler.plan()

    def step(self) -> tuple[list[str], list[tuple[str, int, int]]]:
        """Ids of those who decode, and the chunks of those who do not yet."""
        plan = self.plan()
        for chunk in plan.prefill:
            chunk.request.prefill_progress = chunk.end
            if chunk.is_last:
                chunk.request.start_decode()
                chunk.request.token_ids.append(1)
        for each in plan.decode:
            each.prefill_progress += 1
            each.token_ids.append(1)
        assert_consistent(self.pool)
        return (
            [each.request_id for each in plan.decode],
            [(c.request.request_id, c.start, c.end) for c in plan.prefill],
        )


def test_a_prompt_advances_a_chunk_a_step_and_then_decodes() -> None:
    bench = Bench()
    (own,) = bench.add(10)
    assert bench.step() == ([], [("r0", 0, 4)])
    assert own.state is RequestState.PREFILL
    assert bench.step() == ([], [("r0", 4, 8)])
    assert bench.step() == ([], [("r0", 8, 10)])
    assert own.state is DECODE
    assert bench.step() == (["r0"], [])


@pytest.mark.parametrize(
    ("prompt", "ends"),
    [(1, [1]), (3, [3]), (4, [4]), (5, [4, 5]), (8, [4, 8]), (13, [4, 8, 12, 13])],
)
def test_chunks_at_their_boundaries(prompt: int, ends: list[int]) -> None:
    bench = Bench()
    bench.add(prompt)
    seen = [bench.step()[1] for _ in range(len(ends))]
    assert seen == [[("r0", start, end)] for start, end in zip([0, *ends], ends, strict=False)]
    assert bench.step() == (["r0"], [])


def test_those_who_decode_are_in_every_plan() -> None:
    bench = Bench()
    bench.add(2, 3)
    for _ in range(2):
        bench.step()
    bench.add(40)
    for i in range(10):
        assert bench.step() == (["r0", "r1"], [("r2", 4 * i, 4 * i + 4)])
    assert bench.step() == (["r0", "r1", "r2"], [])


@pytest.mark.parametrize(("chunks", "expected"), [(1, 1), (2, 2), (3, 3), (None, 5), (9, 5)])
def test_so_many_prompts_advance_by_a_chunk_each(chunks: int | None, expected: int) -> None:
    bench = Bench(budget=None, chunks=chunks)
    bench.add(*[10] * 5)
    for step in range(2):
        assert bench.step() == ([], [(f"r{i}", 4 * step, 4 * step + 4) for i in range(expected)])


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_cap_counts_prompts_however_short(chunks: int) -> None:
    bench = Bench(budget=None, chunks=chunks)
    bench.add(*[1] * 6)
    order = []
    for _ in range(6 // chunks):
        prefill = bench.step()[1]
        assert len(prefill) == chunks
        order += prefill
    assert order == [(f"r{i}", 0, 1) for i in range(6)]


def test_cap_and_budget_hold_together() -> None:
    bench = Bench(budget=6, chunks=2)
    bench.add(2, 2, 9, 9)
    assert bench.step()[1] == [("r0", 0, 2), ("r1", 0, 2)], "the cap, with tokens left"
    assert bench.step()[1] == [("r2", 0, 4), ("r3", 0, 2)], "the budget, which cuts the last one"
    assert bench.step()[1] == [("r2", 4, 8), ("r3", 2, 4)]


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 8, 9, 10, None])
def test_only_the_budget_cuts_a_prompt_that_is_no_longer_than_a_chunk(budget: int | None) -> None:
    bench = Bench(budget=budget)
    lengths = (4, 1, 3, 2, 4)
    bench.add(*lengths)
    cut = 0
    while prefill := bench.step()[1]:
        left = [lengths[int(name[1:])] - end for name, _, end in prefill]
        assert not any(left[:-1]), "whole, or the rest of what was cut before"
        if left[-1]:
            assert sum(end - start for _, start, end in prefill) == budget, "cut where the budget ends"
            cut += 1
    ends = list(itertools.accumulate(lengths))
    step_ends = [] if budget is None else range(budget, ends[-1], budget)
    assert cut == sum(end not in ends for end in step_ends)


def test_short_prompts_share_the_budget() -> None:
    bench = Bench()
    bench.add(1, 2, 1, 1, 2)
    assert bench.step() == ([], [("r0", 0, 1), ("r1", 0, 2), ("r2", 0, 1)])
    assert bench.step() == (["r0", "r1", "r2"], [("r3", 0, 1), ("r4", 0, 2)])


def test_a_long_prompts_rest_leaves_tokens_for_the_next_one() -> None:
    bench = Bench()
    bench.add(6, 1, 9, 1)
    assert bench.step()[1] == [("r0", 0, 4)]
    assert bench.step()[1] == [("r0", 4, 6), ("r1", 0, 1), ("r2", 0, 1)]
    # The last one would fit beside it whole, and does not overtake whom it came after.
    assert bench.step()[1] == [("r2", 1, 5)]
    assert bench.step()[1] == [("r2", 5, 9)]
    assert bench.step()[1] == [("r3", 0, 1)]


def test_those_who_have_begun_go_on_before_newcomers_begin() -> None:
    bench = Bench(budget=2 * CHUNK)
    first, second, _, fourth = bench.add(6, 20, 6, 6)
    assert [c[0] for c in bench.step()[1]] == ["r0", "r1"]
    assert bench.step()[1] == [("r0", 4, 6), ("r1", 4, 8), ("r2", 0, 2)]
    # Even a newcomer that arrived earlier waits for those who have begun.
    fourth.arrival = -1
    assert bench.step() == (["r0"], [("r1", 8, 12), ("r2", 2, 6)])
    assert bench.step()[1] == [("r1", 12, 16), ("r3", 0, 4)]
    assert bench.step()[1] == [("r3", 4, 6), ("r1", 16, 20)]
    assert first.state is second.state is DECODE


@pytest.mark.parametrize("most", [1, 2, 3, None])
def test_those_who_have_begun_go_on_oldest_first(most: int | None) -> None:
    bench = Bench(budget=None)
    requests = bench.add(12, 12, 12)
    bench.step()
    bench.scheduler.active.reverse()
    capped = Bench(budget=None, chunks=most).scheduler
    capped.active = bench.scheduler.active
    assert capped.prefill_requests() == requests[:most]
    bounded = Bench(budget=None if most is None else most * CHUNK).scheduler
    assert [(c.request, c.start, c.end) for c in bounded.chunks(requests)] == [
        (each, 4, 8) for each in requests[:most]
    ]
    assert bench.step()[1] == [("r0", 4, 8), ("r1", 4, 8), ("r2", 4, 8)]


def test_one_who_arrives_between_chunks_joins_the_next_pass() -> None:
    bench = Bench(budget=None)
    bench.add(12)
    assert bench.step()[1] == [("r0", 0, 4)]
    bench.add(3)
    assert bench.step()[1] == [("r0", 4, 8), ("r1", 0, 3)]
    bench.add(9)
    assert bench.step() == (["r1"], [("r0", 8, 12), ("r2", 0, 4)])


def test_nobody_is_in_both_parts_of_a_plan() -> None:
    bench = Bench(budget=None)
    bench.add(1, 9, 5, 13, 4, 2)
    for _ in range(6):
        decode, prefill = bench.step()
        names = [name for name, *_ in prefill]
        assert set(decode).isdisjoint(names)
        assert len(set(names)) == len(names)
        assert sorted(decode + names) == [f"r{i}" for i in range(6)], "and with no cap nobody is left out"


@pytest.mark.parametrize("budget", [3, CHUNK, 2 * CHUNK, 10, None])
def test_a_steps_work_is_bounded_and_its_budget_is_used(budget: int | None) -> None:
    bench = Bench(budget=budget, size=6)
    requests = bench.add(30, 2, 17, 9, 1, 25)
    for _ in range(30):
        left = sum(
            min(CHUNK, len(r.token_ids) - r.prefill_progress) for r in requests if r.state is not DECODE
        )
        plan = bench.plan()
        most = left if budget is None else min(budget, left)
        assert sum(chunk.end - chunk.start for chunk in plan.prefill) == most
        assert all(1 <= chunk.end - chunk.start <= CHUNK for chunk in plan.prefill)
        bench.step()


def state_of(bench: Bench) -> Any:
    scheduler = bench.scheduler
    everybody = [*scheduler.waiting, *scheduler.active]
    fields = [(f.name, str(getattr(r, f.name))) for r in everybody for f in dataclasses.fields(r)]
    return fields, list(scheduler.waiting), list(scheduler.active), str(vars(bench.pool.allocator))


@pytest.mark.parametrize(("budget", "chunks"), [(CHUNK, None), (None, None), (None, 2)])
def test_a_plan_changes_nothing(budget: int | None, chunks: int | None) -> None:
    bench = Bench(budget=budget, chunks=chunks, size=3)
    bench.add(10, 2, 7, 5)
    for _ in range(6):
        plan = bench.plan()
        before = state_of(bench)
        assert bench.scheduler.plan() == plan
        assert bench.scheduler.plan() == plan
        assert state_of(bench) == before
        bench.step()


def test_there_is_work_all_through_a_prefill() -> None:
    bench = Bench()
    assert not bench.scheduler.has_work
    bench.add(10)
    for _ in range(3):
        assert bench.scheduler.has_work
        assert bench.scheduler.next_wake(5.0) == 5.0
        bench.step()
    bench.scheduler.active[0].finish("length")
    assert bench.scheduler.has_work
    bench.plan()
    assert not bench.scheduler.has_work
    assert bench.scheduler.next_wake(5.0) is None


def test_the_whole_prompts_blocks_are_reserved_at_admission() -> None:
    """One admitted and not yet begun is no free memory for the next one."""
    bench = Bench(num_blocks=60)
    first, second, _ = bench.add(30, 20, 20)
    bench.step()
    assert first.prefill_progress == 4
    assert bench.pool.capacity(first.slot or 0) == 30
    assert second.slot is None, "80 % of 60, less 30 for the first, leave 18"
    bench = Bench(num_blocks=100)
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


def test_one_who_is_preempted_amid_its_chunks_begins_again() -> None:
    bench = Bench(num_blocks=24)
    (old,) = bench.add(2)
    for _ in range(2):
        bench.step()
    (young,) = bench.add(12)
    while young.prefill_progress < 8:
        bench.step()
    assert young.state is RequestState.PREFILL
    old.token_ids += [1] * (24 - 11 - len(old.token_ids))  # the oldest takes one column too many
    make_room(bench.scheduler, bench.pool)
    assert (young.state, young.slot, young.prefill_progress) == (RequestState.WAITING, None, 0)
    assert bench.scheduler.waiting[0] is young
    assert bench.scheduler.preemptions == 1
    old.finish("length")
    assert bench.step()[1] == [("r1", 0, 4)]


def test_one_who_is_preempted_while_it_decodes_prefills_all_it_has_in_chunks() -> None:
    bench = Bench(num_blocks=14)
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


def test_a_cancelled_request_is_out_of_the_next_plan() -> None:
    bench = Bench(budget=None)
    _, second = bench.add(12, 12)
    bench.step()
    second.cancel()
    assert bench.step()[1] == [("r0", 4, 8)]
    assert second.slot is None
    assert bench.pool.allocator.num_allocated == 12
