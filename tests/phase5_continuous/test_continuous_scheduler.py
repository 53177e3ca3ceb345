"""Admission and retirement in every step: the requests that run, wait and leave."""

from __future__ import annotations

import pytest

from common.request import RequestState
from tests.support.engines import Bench, Variant, add, assert_all_free, assert_answered, greedy, ids, run


@pytest.fixture
def bench(variant: Variant) -> Bench:
    """Batches of two."""
    return variant.bench(max_batch_size=2, max_seq_len=16)


# ---------------------------------------------------------------------- a batch made anew


def test_a_request_that_arrives_is_prefilled_in_the_next_step(variant: Variant) -> None:
    bench = variant.bench(max_batch_size=3)
    bench.add(3)
    assert bench.step() == ([], [("r0", 0, 3)])
    bench.add(3)
    assert bench.step() == (["r0"], [("r1", 0, 3)])
    assert bench.step() == (["r0", "r1"], [])


def test_a_finished_request_leaves_in_the_next_step_and_the_first_waiting_one_gets_its_seat(
    bench: Bench,
) -> None:
    first, second, *_ = bench.add(3, 3, 3, 3)
    assert bench.step() == ([], [("r0", 0, 3), ("r1", 0, 3)])
    assert bench.step() == (["r0", "r1"], [])
    second.finish("length")
    assert bench.step() == (["r0"], [("r2", 0, 3)])
    first.finish("length")
    assert bench.step() == (["r2"], [("r3", 0, 3)])
    assert bench.waiting == []


def test_no_more_than_the_batch_run(bench: Bench) -> None:
    bench.add(*[3] * 7)
    bench.step()
    assert (len(bench.active), len(bench.waiting)) == (2, 5)
    assert bench.pool.free_slot_count() == 0


def test_free_seats_count_as_room(variant: Variant) -> None:
    """`max_waiting_requests` 4, batch 2, 8 sent at once: 6 accepted."""
    bench = variant.bench(max_batch_size=2, max_waiting_requests=4)
    requests = [bench.request(3) for _ in range(8)]
    assert [bench.scheduler.add_request(each) for each in requests] == [True] * 6 + [False] * 2
    assert bench.scheduler.queue_room() == 0
    bench.step()
    assert (bench.scheduler.num_waiting, bench.scheduler.queue_room()) == (4, 0)
    requests[0].finish("length")
    bench.step()
    assert bench.scheduler.queue_room() == 1


@pytest.mark.parametrize("state", [RequestState.PREFILL, RequestState.DECODE])
def test_a_cancelled_request_leaves_in_the_next_step(state: RequestState, bench: Bench) -> None:
    first, _, _ = bench.add(3, 3, 3)
    bench.begin() if state is RequestState.PREFILL else bench.step()
    assert first.state is state
    first.cancel()
    assert bench.begin() == ["r1", "r2"]
    assert first.slot is None


# ---------------------------------------------------------------------- with an engine


def test_no_request_starves(variant: Variant) -> None:
    engine = variant.build(max_batch_size=4)
    requests = [add(engine, [i], greedy(3 + 5 * (i % 3))) for i in range(12)]
    outputs = run(engine)
    assert [output.request_id for output in outputs if output.completion_tokens == 1] == ids(requests)
    assert_answered(outputs, requests)
    assert_all_free(engine)
