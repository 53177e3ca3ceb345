"""Admission by memory, growth by the block, preemption of the latest: integers only, no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from common.engine import Engine
from common.errors import InvalidRequestError
from common.request import Request, RequestState, SamplingParams
from phase5_continuous.cache import SlottedKVCache
from phase6_paged import Config, Scheduler
from phase6_paged.cache import PagedKVCachePool
from tests.engine_helpers import (
    CPU,
    Clock,
    RememberingModel,
    add,
    assert_all_free,
    build,
    continuation,
    greedy,
    make_room,
    run,
    tokens_of,
)
from tests.phase6_paged.support import SMALLEST, assert_consistent, assert_streams, paged, request


class Bench:
    """A scheduler and its pool, stepped without a runner."""

    def __init__(self, num_blocks: int, block_size: int = 1, *, size: int = 8, **options: Any) -> None:
        config = Config(
            max_batch_size=size, max_seq_len=4096, num_blocks=num_blocks, block_size=block_size, **options
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

    def hold(self, tokens: int) -> Request:
        """Somebody active whose memory leaves the rest of the pool free."""
        (holder,) = self.add(tokens)
        assert self.pool.reserve(holder, tokens)
        self.scheduler.waiting.remove(holder)
        self.scheduler.active.append(holder)
        holder.start_prefill()
        holder.start_decode()
        return holder

    def admitted(self) -> list[str]:
        before = set(self.scheduler.active)
        self.scheduler.admit(self.pool)
        assert_consistent(self.pool)
        return [r.request_id for r in self.scheduler.active if r not in before]

    def step(self) -> None:
        """A whole step; every pass succeeds and everybody gets a token."""
        for done in self.scheduler.retire():
            self.pool.release(done)
        make_room(self.scheduler, self.pool)
        self.scheduler.admit(self.pool)
        for each in self.scheduler.active:
            if each.state is RequestState.PREFILL:
                each.start_decode()
            each.token_ids.append(1)
        assert_consistent(self.pool)

    @property
    def waiting(self) -> list[str]:
        return [each.request_id for each in self.scheduler.waiting]


def ids(requests: Sequence[Request]) -> list[str]:
    return [each.request_id for each in requests]


def test_free_seats_that_memory_cannot_fill_count_as_room_in_the_queue() -> None:
    """More may then wait than `max_waiting_requests`: as many as seats are free."""
    bench = Bench(12, size=4, max_waiting_requests=2)
    bench.hold(10)
    for left in range(5, 0, -1):
        assert bench.scheduler.queue_room() == left
        bench.add(5)
    assert not bench.scheduler.add_request(request(5, 64, "one more"))
    assert bench.admitted() == []
    assert (bench.scheduler.num_waiting, bench.scheduler.free_seats) == (5, 3)
    assert bench.scheduler.queue_room() == 0
    bench.scheduler.active[0].finish("length")
    bench.step()
    assert bench.scheduler.num_waiting == 4, "the first of them has the memory that came back"
    assert bench.scheduler.queue_room() == 1


# ---------------------------------------------------------------------- admission


def test_250_tokens_free_admit_the_first_of_100_200_300() -> None:
    bench = Bench(num_blocks=300)
    bench.hold(50)
    assert bench.pool.free_token_capacity() == 250
    first, *_ = bench.add(100, 200, 300)
    assert bench.admitted() == [first.request_id]
    assert bench.scheduler.num_waiting == 2


def test_then_625_admit_the_other_two() -> None:
    bench = Bench(num_blocks=675)
    bench.hold(50)
    assert bench.pool.free_token_capacity() == 625
    requests = bench.add(200, 300)
    assert bench.admitted() == ids(requests), "200 + 300 are 80 % of 625"


@pytest.mark.parametrize(("free", "count"), [(624, 1), (625, 2)])
def test_a_fifth_of_the_free_pool_is_kept_back(free: int, count: int) -> None:
    bench = Bench(num_blocks=50 + free)
    bench.hold(50)
    bench.add(200, 300)
    assert len(bench.admitted()) == count


def test_nothing_free_admits_nobody() -> None:
    bench = Bench(num_blocks=50)
    bench.hold(50)
    bench.add(1)
    assert bench.pool.free_token_capacity() == 0
    assert bench.admitted() == []


def test_without_a_budget_only_the_seats_limit() -> None:
    """None: the pool has slots, and what they hold is no matter."""
    config = Config(max_batch_size=2, max_seq_len=4096, kv_cache_backend="contiguous")
    pool = SlottedKVCache(config, SMALLEST, CPU)
    assert pool.free_token_capacity() is None
    scheduler = Scheduler(config, Clock())
    for n in (1000, 2000, 3000):
        assert scheduler.add_request(request(n, 64))
    scheduler.admit(pool)
    assert [r.num_prompt_tokens for r in scheduler.active] == [1000, 2000]


@pytest.mark.parametrize(("free_blocks", "count"), [(4, 1), (5, 2)])
def test_whole_blocks_are_counted(free_blocks: int, count: int) -> None:
    """Two prompts of 17 take two blocks of 16 each, though their tokens would nearly fit in two."""
    bench = Bench(num_blocks=1 + free_blocks, block_size=16)
    bench.hold(3)
    bench.add(17, 17)
    assert len(bench.admitted()) == count


def test_generated_tokens_are_counted() -> None:
    bench = Bench(num_blocks=60)
    bench.hold(10)
    resumed, _ = bench.add(20, 1)
    resumed.token_ids += [1] * 21  # 41 > 80 % of 50
    assert bench.admitted() == []
    resumed.token_ids.pop()
    assert bench.admitted() == [resumed.request_id]
    assert bench.pool.capacity(resumed.slot or 0) == 40


def test_nobody_overtakes_one_who_does_not_fit() -> None:
    bench = Bench(num_blocks=100)
    bench.hold(50)
    bench.add(45, 1)
    assert bench.admitted() == []


def test_with_nobody_active_a_prompt_may_take_the_whole_pool() -> None:
    bench = Bench(num_blocks=100)
    (only,) = bench.add(100)
    assert bench.admitted() == [only.request_id]
    assert bench.pool.free_token_capacity() == 0


def test_the_waiver_is_for_one_request() -> None:
    """Once somebody is active the reserve counts again, in the same admission."""
    bench = Bench(num_blocks=100)
    bench.add(79, 2)
    assert bench.admitted() == ["r0"]
    bench = Bench(num_blocks=100)
    bench.add(79, 1)
    assert bench.admitted() == ["r0", "r1"]
    bench = Bench(num_blocks=100)
    bench.add(90, 1)
    assert bench.admitted() == ["r0"]


def test_seats_limit_too() -> None:
    bench = Bench(num_blocks=1000, size=3)
    bench.add(1, 1, 1, 1, 1)
    assert bench.admitted() == ["r0", "r1", "r2"]


def test_the_whole_prompt_is_reserved_at_admission_and_its_first_token_is_not() -> None:
    bench = Bench(num_blocks=10, block_size=4)
    (owner,) = bench.add(8)
    assert bench.admitted() == ["r0"]
    assert bench.pool.capacity(owner.slot or 0) == 8
    assert bench.pool.allocator.num_allocated == 2


def test_a_batch_larger_than_the_slots_of_equal_bytes() -> None:
    """The bytes of 8 slots of 4096: 2048 blocks of 16. Sequences of 256 tokens, with a fifth kept back."""
    bench = Bench(num_blocks=8 * 4096 // 16, block_size=16, size=200, max_waiting_requests=300)
    bench.add(*[256] * 200)
    assert len(bench.admitted()) == 128 * 0.8 // 1
    for _ in range(3):
        bench.step()
    assert len(bench.scheduler.active) > 8 * 12


# ---------------------------------------------------------------------- growth and preemption


def test_a_block_is_taken_only_where_the_last_is_full() -> None:
    bench = Bench(num_blocks=10, block_size=4)
    (owner,) = bench.add(3)
    taken = []
    for _ in range(8):
        bench.step()
        taken.append(bench.pool.allocator.num_allocated)
    # After step n the request has 3 + n tokens, of which the last one is not in the cache yet.
    assert taken == [1, 1, 2, 2, 2, 2, 3, 3]
    assert len(owner.token_ids) == 11


def test_the_latest_arrival_is_preempted_and_goes_to_the_front() -> None:
    bench = Bench(num_blocks=6)
    old, young = bench.add(2, 2)
    bench.step()
    assert bench.scheduler.active == [old, young]
    late = bench.add(1)
    bench.step()
    assert bench.pool.free_token_capacity() == 0
    bench.step()
    assert bench.scheduler.active == [old]
    assert bench.waiting == ["r1", *ids(late)], "before those who never ran"
    assert (young.state, young.slot, young.prefill_progress) == (RequestState.WAITING, None, 0)
    assert len(young.token_ids) == 4, "what it has generated stays"
    assert bench.scheduler.preemptions == 1


def test_the_oldest_grows_first() -> None:
    """One block is free and two need it: the older gets it, whatever their places in the batch."""
    bench = Bench(num_blocks=5)
    older, younger = bench.hold(2), bench.hold(2)
    bench.scheduler.active.reverse()
    for each in (older, younger):
        each.token_ids.append(1)
    make_room(bench.scheduler, bench.pool)
    assert bench.scheduler.active == [older]
    assert bench.pool.capacity(older.slot or 0) == 3
    assert younger.state is RequestState.WAITING


def test_one_who_is_the_latest_preempts_itself() -> None:
    bench = Bench(num_blocks=4)
    older, younger = bench.hold(2), bench.hold(2)
    younger.token_ids.append(1)
    make_room(bench.scheduler, bench.pool)
    assert bench.scheduler.active == [older]
    assert bench.waiting == [younger.request_id]


def test_several_preempted_at_once_keep_their_order_of_arrival() -> None:
    bench = Bench(num_blocks=5, block_size=1)
    requests = [bench.hold(1) for _ in range(5)]
    waiting = bench.add(1)
    requests[0].token_ids += [1] * 3
    make_room(bench.scheduler, bench.pool)
    assert bench.scheduler.active == requests[:2]
    assert bench.waiting == [*ids(requests[2:]), *ids(waiting)]
    assert bench.scheduler.preemptions == 3
    assert_consistent(bench.pool)


def test_preempted_over_several_steps_keep_their_order_of_arrival() -> None:
    bench = Bench(num_blocks=12)
    requests = bench.add(2, 2, 2)
    for _ in range(12):
        bench.step()
        waiting = [r.arrival for r in bench.scheduler.waiting]
        assert waiting == sorted(waiting)
        assert bench.scheduler.active[0] is requests[0], "the oldest is never preempted"
        if bench.pool.allocator.num_allocated == 12 and len(bench.scheduler.active) == 1:
            break
    assert bench.waiting == ["r1", "r2"]


def test_one_who_was_preempted_in_a_step_does_not_come_straight_back() -> None:
    """Its memory goes to those it made room for; coming back in the same step would only push it out again."""
    bench = Bench(num_blocks=20, block_size=2)
    bench.add(9, 9, 9)
    seen: list[int] = []
    for _ in range(16):
        before = bench.scheduler.preemptions
        active = set(bench.scheduler.active)
        bench.step()
        if bench.scheduler.preemptions > before:
            assert set(bench.scheduler.active) < active
            seen.append(bench.scheduler.preemptions - before)
    assert seen


def test_slots_never_preempt() -> None:
    config = Config(max_batch_size=2, max_seq_len=16, kv_cache_backend="contiguous")
    scheduler, pool = Scheduler(config, Clock()), SlottedKVCache(config, SMALLEST, CPU)
    requests = [request(2, 14, str(i)) for i in range(2)]
    for each in requests:
        assert scheduler.add_request(each)
    scheduler.admit(pool)
    for each in requests:
        each.start_decode()
        each.token_ids += [1] * 14
    assert scheduler.make_room(pool) == []
    assert (scheduler.active, scheduler.preemptions) == (requests, 0)


def test_a_cancelled_request_is_not_preempted_for_it_leaves_first() -> None:
    bench = Bench(num_blocks=4)
    older, younger = bench.hold(2), bench.hold(2)
    older.token_ids.append(1)
    younger.cancel()
    for done in bench.scheduler.retire():
        bench.pool.release(done)
    make_room(bench.scheduler, bench.pool)
    assert bench.scheduler.preemptions == 0
    assert bench.scheduler.active == [older]


def test_a_plan_changes_nothing() -> None:
    bench = Bench(num_blocks=100)
    holder = bench.hold(5)
    newcomers = bench.add(3, 4)
    bench.scheduler.admit(bench.pool)
    plan = bench.scheduler.plan()
    assert bench.scheduler.plan() == plan
    assert plan.decode == (holder,)
    assert [(c.request, c.start, c.end) for c in plan.prefill] == [
        (r, 0, len(r.token_ids)) for r in newcomers
    ]


# ---------------------------------------------------------------------- with an engine


def engine_of(num_blocks: int, block_size: int = 4, **options: Any) -> Engine:
    return build("phase6_paged", RememberingModel(), num_blocks=num_blocks, block_size=block_size, **options)


def test_blocks_freed_in_a_step_serve_an_admission_in_that_step() -> None:
    engine = engine_of(4)
    first = add(engine, [1] * 13, greedy(3))
    second = add(engine, [2] * 13, greedy(3))
    outputs = [o for _ in range(3) for o in engine.step()]
    assert first.is_terminal
    assert second.state is RequestState.WAITING
    assert paged(engine).allocator.num_free == 0, "the first holds everything until it is retired"
    outputs += engine.step()
    assert tokens_of(outputs, second) == continuation([2] * 13, 1), "admitted and prefilled in the same step"
    assert first.slot is None
    run(engine)
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("prompt", "new", "param"),
    [(15, 2, "max_tokens"), (1, 16, "max_tokens"), (16, 1, "prompt"), (40, 1, "prompt"), (15, 1, None)],
)
def test_a_request_that_can_never_fit_is_refused_at_submit(prompt: int, new: int, param: str | None) -> None:
    """A pool of 16 tokens, though sequences of 64 are served in principle."""
    engine = engine_of(4)
    params: SamplingParams = greedy(new)
    if param is None:
        own = add(engine, [3] * prompt, params)
        assert tokens_of(run(engine), own) == continuation([3] * prompt, new)
        return
    with pytest.raises(InvalidRequestError, match="16") as caught:
        engine.create_request([3] * prompt, params)
    assert caught.value.param == param
    assert not engine.has_work


def test_those_who_decode_grow_before_anybody_is_admitted() -> None:
    """Four of five free tokens would do for the newcomer, but five who decode need one each in this very step."""
    engine = engine_of(35, 1, max_batch_size=6)
    decoders = [add(engine, [i + 1] * 5, greedy(8)) for i in range(5)]
    engine.step()
    engine.step()
    assert paged(engine).free_token_capacity() == 5
    newcomer = add(engine, [9] * 4, greedy(2))
    outputs = engine.step()
    assert [o.request_id for o in outputs] == ids(decoders)
    assert (newcomer.state, engine.scheduler.preemptions) == (RequestState.WAITING, 0)
    assert paged(engine).free_token_capacity() == 0


def test_a_prompt_that_fits_the_pool_never_waits_forever() -> None:
    """More than 80 % of everything, behind others: it runs as soon as it is alone."""
    engine = engine_of(10)
    small = [add(engine, [i] * 5, greedy(4)) for i in range(3)]
    large = add(engine, [9] * 38, greedy(2))
    after = add(engine, [8] * 5, greedy(4))
    outputs = run(engine)
    assert_streams(
        outputs,
        {
            r.request_id: continuation(r.prompt_token_ids, r.params.max_new_tokens)
            for r in [*small, large, after]
        },
    )
    first_tokens = [o.request_id for o in outputs if o.completion_tokens == 1]
    assert first_tokens == ids([*small, large, after])
    assert_all_free(engine)


def test_preemptions_are_in_telemetry_and_clients_see_a_pause_only() -> None:
    engine = engine_of(8, 2)
    requests = [add(engine, [i + 1] * 4, greedy(10)) for i in range(3)]
    outputs = run(engine)
    assert engine.telemetry.counters.preemptions == engine.scheduler.preemptions > 0
    assert engine.telemetry.snapshot()["counters"]["preemptions"] == engine.scheduler.preemptions
    assert_streams(outputs, {r.request_id: continuation(r.prompt_token_ids, 10) for r in requests})
    assert_all_free(engine)


@pytest.mark.parametrize("when", ["waiting", "resumed"])
def test_a_preempted_request_can_be_cancelled(when: str) -> None:
    engine = engine_of(8, 2)
    requests = [add(engine, [i + 1] * 4, greedy(10)) for i in range(3)]
    outputs = []
    victim = requests[-1]
    while engine.scheduler.preemptions == 0:
        outputs += engine.step()
    assert victim.state is RequestState.WAITING
    assert victim.num_generated_tokens > 0
    while when == "resumed" and victim.slot is None:
        outputs += engine.step()
    engine.cancel(victim.request_id)
    outputs += run(engine)
    own = [o for o in outputs if o.request_id == victim.request_id]
    assert [o.finish_reason for o in own if o.finished] == ["cancelled"]
    assert_streams(
        [o for o in outputs if o.request_id != victim.request_id],
        {r.request_id: continuation(r.prompt_token_ids, 10) for r in requests[:-1]},
    )
    assert_all_free(engine)


def test_a_sampled_request_draws_the_same_after_preemption() -> None:
    """Its random numbers go with its tokens: nothing is drawn twice."""
    params = SamplingParams(temperature=5.0, seed=3, max_new_tokens=12, ignore_eos=True)
    alone = engine_of(100, 2)
    expected = []
    for i in range(3):
        own = add(alone, [i + 1] * 4, params)
        expected.append(tokens_of(run(alone), own))
    engine = engine_of(8, 2)
    requests = [add(engine, [i + 1] * 4, params) for i in range(3)]
    outputs = run(engine)
    assert engine.scheduler.preemptions > 0
    assert [tokens_of(outputs, r) for r in requests] == expected
    assert any(t != continuation(r.prompt_token_ids, 12) for t, r in zip(expected, requests, strict=True))


def test_sixteen_requests_at_batch_16() -> None:
    engine = engine_of(200, max_batch_size=16)
    requests = [add(engine, [i + 1] * (1 + 3 * i % 17), greedy(6 + i % 5)) for i in range(16)]
    outputs = engine.step()
    assert len(engine.scheduler.active) == 16
    assert len(outputs) == 16
    outputs += run(engine)
    assert_streams(
        outputs,
        {r.request_id: continuation(r.prompt_token_ids, r.params.max_new_tokens) for r in requests},
    )
    assert_all_free(engine)
