"""Admission by memory, growth by the block, preemption of the latest arrival."""

from __future__ import annotations

from typing import Any

import pytest

from common.engine.engine import Engine
from common.errors import InvalidRequestError
from common.request import RequestState
from tests.support.engines import (
    Bench,
    Variant,
    add,
    assert_answered,
    assert_served,
    continuation,
    greedy,
    run,
    tokens_of,
)
from tests.support.pools import paged


def bench_of(variant: Variant, num_blocks: int, block_size: int = 1, **options: Any) -> Bench:
    return variant.bench(num_blocks=num_blocks, block_size=block_size, **options)


# ---------------------------------------------------------------------- admission


def test_250_tokens_free_admit_the_first_of_100_200_300(variant: Variant) -> None:
    bench = bench_of(variant, 300)
    bench.hold(50)
    bench.add(100, 200, 300)
    assert bench.pool.free_token_capacity() == 250
    assert bench.admitted() == ["r1"]


@pytest.mark.parametrize(("free", "admitted"), [(0, []), (624, ["r1"]), (625, ["r1", "r2"])])
def test_a_fifth_of_the_free_pool_is_kept_back(variant: Variant, free: int, admitted: list[str]) -> None:
    bench = bench_of(variant, 50 + free)
    bench.hold(50)
    bench.add(200, 300)
    assert bench.admitted() == admitted


@pytest.mark.parametrize(("free_blocks", "count"), [(4, 1), (5, 2)])
def test_whole_blocks_are_counted(variant: Variant, free_blocks: int, count: int) -> None:
    """Two prompts of 17 tokens take two blocks of 16 each, four in all."""
    bench = bench_of(variant, 1 + free_blocks, block_size=16)
    bench.hold(3)
    bench.add(17, 17)
    assert len(bench.admitted()) == count


def test_generated_tokens_are_counted(variant: Variant) -> None:
    bench = bench_of(variant, 60)
    bench.hold(10)
    resumed, _ = bench.add(20, 1)
    resumed.token_ids += [1] * 21  # 41 > 80 % of 50
    assert bench.admitted() == []
    resumed.token_ids.pop()
    assert bench.admitted() == ["r1"]
    assert bench.pool.capacity(resumed.slot) == 40


def test_no_request_overtakes_one_that_does_not_fit(variant: Variant) -> None:
    bench = bench_of(variant, 100)
    bench.hold(50)
    bench.add(45, 1)
    assert bench.admitted() == []


def test_if_no_request_is_active_a_prompt_may_take_the_whole_pool(variant: Variant) -> None:
    bench = bench_of(variant, 100)
    bench.add(100)
    assert bench.admitted() == ["r0"]
    assert bench.pool.free_token_capacity() == 0


@pytest.mark.parametrize(("prompts", "count"), [((79, 2), 1), ((79, 1), 2), ((90, 1), 1)])
def test_the_waiver_is_for_one_request(variant: Variant, prompts: tuple[int, int], count: int) -> None:
    """Once a request is admitted, the reserve is kept again for the next one in the same admission."""
    bench = bench_of(variant, 100)
    bench.add(*prompts)
    assert len(bench.admitted()) == count


def test_seats_limit_admission(variant: Variant) -> None:
    bench = bench_of(variant, 1000, max_batch_size=3)
    bench.add(1, 1, 1, 1, 1)
    assert bench.admitted() == ["r0", "r1", "r2"]


def test_free_seats_that_memory_cannot_fill_count_as_room_in_the_queue(variant: Variant) -> None:
    """The number of waiting requests may then exceed `max_waiting_requests` by the number of free seats."""
    bench = bench_of(variant, 12, max_batch_size=4, max_waiting_requests=2)
    holder = bench.hold(10)
    for left in range(5, 0, -1):
        assert bench.scheduler.queue_room() == left
        bench.add(5)
    assert not bench.scheduler.add_request(bench.request(5))
    assert bench.admitted() == []
    assert (len(bench.waiting), bench.scheduler.free_seats) == (5, 3)
    assert bench.scheduler.queue_room() == 0
    holder.finish("length")
    bench.step()
    assert len(bench.waiting) == 4, "the first of them has the memory that came back"
    assert bench.scheduler.queue_room() == 1


# ---------------------------------------------------------------------- growth and preemption


def test_a_block_is_taken_only_where_the_last_is_full(variant: Variant) -> None:
    bench = bench_of(variant, 10, block_size=4)
    bench.add(3)
    taken = []
    for _ in range(8):
        bench.step()
        taken.append(bench.pool.allocator.num_allocated)
    # After step n the request has 3 + n tokens, of which the last one is not in the cache yet.
    assert taken == [1, 1, 2, 2, 2, 2, 3, 3]


def test_the_latest_arrival_is_preempted_and_goes_to_the_front(variant: Variant) -> None:
    bench = bench_of(variant, 6)
    _, young = bench.add(2, 2)
    bench.step()
    bench.add(1)
    bench.step()
    assert (bench.active, bench.pool.free_token_capacity()) == (["r0", "r1"], 0)
    bench.step()
    assert bench.active == ["r0"]
    assert bench.waiting == ["r1", "r2"], "before those who never ran"
    assert (young.state, young.slot, young.prefill_progress) == (RequestState.WAITING, None, 0)
    assert len(young.token_ids) == 4, "what it has generated stays"
    assert bench.scheduler.preemptions == 1


def test_a_preempted_request_is_not_admitted_in_the_same_step(variant: Variant) -> None:
    """Its memory goes to other requests. If it were admitted in the same step, it would be preempted again."""
    bench = bench_of(variant, 20, block_size=2)
    bench.add(9, 9, 9)
    for _ in range(16):
        before, active = bench.scheduler.preemptions, bench.active
        bench.step()
        assert bench.scheduler.preemptions == before or set(bench.active) < set(active)
    assert bench.scheduler.preemptions > 0


# ---------------------------------------------------------------------- with an engine


def engine_of(variant: Variant, num_blocks: int, block_size: int = 4, **options: Any) -> Engine:
    return variant.build(num_blocks=num_blocks, block_size=block_size, **options)


def test_blocks_freed_in_a_step_serve_an_admission_in_that_step(variant: Variant) -> None:
    engine = engine_of(variant, 4)
    first, second = (add(engine, [i] * 13, greedy(3)) for i in (1, 2))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert first.is_terminal
    assert second.state is RequestState.WAITING
    assert paged(engine).allocator.num_free == 0, "the first holds everything until it is retired"
    outputs += engine.step()
    assert tokens_of(outputs, second) == continuation([2] * 13, 1), "admitted and prefilled in the same step"
    assert first.slot is None
    assert_served(engine, [first, second], outputs)


@pytest.mark.parametrize(
    ("prompt", "new", "param"),
    [(15, 2, "max_tokens"), (1, 16, "max_tokens"), (16, 1, "prompt"), (40, 1, "prompt")],
)
def test_a_request_that_can_never_fit_is_refused_at_submit(
    variant: Variant, prompt: int, new: int, param: str
) -> None:
    """The pool holds 16 tokens, although `max_seq_len` is 64."""
    engine = engine_of(variant, 4)
    with pytest.raises(InvalidRequestError, match="16") as caught:
        engine.maker.create([3] * prompt, greedy(new))
    assert caught.value.param == param
    largest = add(engine, [3] * 15, greedy(1))
    assert_answered(run(engine), [largest])
