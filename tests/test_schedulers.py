"""What holds for the scheduler of every phase: its queue, its plans, and when it has work."""

from __future__ import annotations

import pytest

from common.phases import phase_names
from common.request import RequestState
from tests.engine_helpers import Bench, Variant

#: Options, where a phase has them, under which memory is ample, a chunk is short and no time passes.
OPTIONS: dict[str, float] = {"batch_wait_timeout_s": 0.0, "num_blocks": 64, "prefill_chunk_size": 4}


@pytest.fixture(params=phase_names())
def bench(request: pytest.FixtureRequest) -> Bench:
    """Batches of two; three more requests wait."""
    variant = Variant.of(request.param, **OPTIONS)
    return variant.bench(max_batch_size=2, max_waiting_requests=3, max_seq_len=256)


def test_a_plan_changes_nothing(bench: Bench) -> None:
    requests = bench.add(9, 3, 5)
    for _ in range(6):
        bench.begin()
        before = bench.state
        plan = bench.scheduler.plan()
        assert bench.scheduler.plan() == plan
        assert bench.state == before
        assert set(plan.decode).isdisjoint(chunk.request for chunk in plan.prefill)
        bench.step()
    assert requests[0].state is RequestState.DECODE


def test_there_is_work_until_the_last_request_has_left(bench: Bench) -> None:
    scheduler = bench.scheduler
    assert (scheduler.has_work, scheduler.next_wake(bench.clock.now)) == (False, None)
    (request,) = bench.add(9)
    while request.state is not RequestState.DECODE:
        assert (scheduler.has_work, scheduler.next_wake(bench.clock.now)) == (True, bench.clock.now)
        bench.step()
    request.finish("length")
    assert scheduler.has_work, "it still holds its memory"
    bench.begin()
    assert (scheduler.has_work, scheduler.next_wake(bench.clock.now)) == (False, None)


def test_requests_are_admitted_in_the_order_of_their_arrival(bench: Bench) -> None:
    bench.add(3, 3, 3)
    order: list[str] = []
    while bench.scheduler.has_work:
        order += bench.admitted()
        assert len(bench.active) <= 2
        for request in bench.scheduler.active:
            request.cancel()
    assert order == ["r0", "r1", "r2"]


def test_the_queue_has_an_end(bench: Bench) -> None:
    while (room := bench.scheduler.queue_room()) > 0:
        bench.add(3)
        assert bench.scheduler.queue_room() == room - 1
    waiting = bench.waiting
    refused = bench.request(3)
    assert not bench.scheduler.add_request(refused)
    assert (bench.waiting, refused.state) == (waiting, RequestState.WAITING)
    bench.begin()
    assert len(waiting) == len(bench.waiting) + 2
    for request in bench.scheduler.active:
        request.cancel()
    bench.begin()
    assert bench.scheduler.add_request(refused)


def test_a_request_that_is_cancelled_while_it_waits_leaves_at_the_next_retirement(bench: Bench) -> None:
    bench.add(3, 3)
    bench.begin()
    second, third = bench.add(3, 3)
    second.cancel()
    assert bench.scheduler.num_waiting == 2
    assert bench.scheduler.retire() == [second]
    assert list(bench.scheduler.waiting) == [third]
