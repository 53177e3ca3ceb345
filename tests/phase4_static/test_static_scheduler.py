"""A static batch: when it forms, its requests, and when it leaves."""

from __future__ import annotations

import pytest

from common.request import Request, RequestState
from tests.support.engines import Bench

WAIT_S = 0.05


def bench_of(size: int = 2, wait_s: float = WAIT_S) -> Bench:
    return Bench("phase4_static", max_batch_size=size, batch_wait_timeout_s=wait_s)


@pytest.fixture
def bench() -> Bench:
    """Batches of two."""
    return bench_of()


def end(bench: Bench, *requests: Request) -> None:
    """Finish these requests, or all active ones."""
    for request in bench.scheduler.active:
        if request.state is RequestState.PREFILL:
            request.start_decode()
    for request in requests or bench.scheduler.active:
        request.finish("length")


def wake(bench: Bench) -> float | None:
    """Return the seconds until the scheduler wants the next step; None: it waits for no time."""
    at = bench.scheduler.next_wake(bench.clock.now)
    return None if at is None else at - bench.clock.now


# ---------------------------------------------------------------------- a batch forms


def test_a_full_batch_forms_at_once(bench: Bench) -> None:
    bench.add(3, 3)
    assert wake(bench) == 0
    assert bench.begin() == ["r0", "r1"]


def test_a_batch_that_is_not_full_waits_for_its_time(bench: Bench) -> None:
    bench.add(3)
    for left in (WAIT_S, WAIT_S / 4):
        assert wake(bench) == pytest.approx(left)
        assert bench.begin() == []
        bench.clock.advance(WAIT_S * 3 / 4)
    assert bench.begin() == ["r0"]


def test_the_time_counts_from_the_first_request_not_from_the_latest() -> None:
    bench = bench_of(size=3)
    bench.add(3)
    bench.clock.advance(WAIT_S * 0.8)
    bench.add(3)
    bench.clock.advance(WAIT_S * 0.2)
    assert bench.begin() == ["r0", "r1"]


def test_every_batch_has_a_fresh_timer(bench: Bench) -> None:
    bench.add(3)
    bench.clock.advance(WAIT_S)
    assert bench.begin() == ["r0"]
    end(bench)
    assert bench.begin() == []
    bench.clock.advance(10.0)
    bench.add(3)
    assert bench.begin() == [], "the time of the batch before has nothing to do with this one"
    assert wake(bench) == pytest.approx(WAIT_S)
    bench.clock.advance(WAIT_S)
    assert bench.begin() == ["r1"]


def test_a_backlogs_time_starts_when_the_batch_before_retires(bench: Bench) -> None:
    bench.add(3, 3)
    bench.begin()
    bench.add(3)
    bench.clock.advance(10.0)
    assert bench.begin() == ["r0", "r1"]
    end(bench)
    assert bench.begin() == [], "the batch has retired just now"
    assert wake(bench) == pytest.approx(WAIT_S)
    bench.clock.advance(WAIT_S)
    assert bench.begin() == ["r2"]


def test_five_requests_in_batches_of_two(bench: Bench) -> None:
    bench.add(3, 3, 3, 3, 3)
    batches = []
    while bench.scheduler.has_work:
        batches.append(bench.begin())
        end(bench)
        bench.clock.advance(WAIT_S)
    assert [batch for batch in batches if batch] == [["r0", "r1"], ["r2", "r3"], ["r4"]]


def test_the_last_waiting_request_that_is_cancelled_ends_the_timer(bench: Bench) -> None:
    (first,) = bench.add(3)
    bench.clock.advance(WAIT_S * 0.9)
    first.cancel()
    assert bench.begin() == []
    assert wake(bench) is None
    bench.clock.advance(WAIT_S * 0.1)
    bench.add(3)
    assert bench.begin() == []
    assert wake(bench) == pytest.approx(WAIT_S)


# ---------------------------------------------------------------------- and stays whole


def test_a_batch_that_is_not_full_takes_no_more_requests_once_it_runs() -> None:
    bench = bench_of(size=4)
    bench.add(3, 3)
    bench.clock.advance(WAIT_S)
    assert bench.begin() == ["r0", "r1"]
    bench.add(3, 3, 3, 3)
    assert bench.begin() == ["r0", "r1"]


def test_a_batch_stays_until_its_last_member_is_done(bench: Bench) -> None:
    first, second = bench.add(3, 3)
    bench.add(3, 3)
    bench.begin()
    end(bench, first)
    assert bench.begin() == ["r0", "r1"], "no request joins"
    plan = bench.scheduler.plan()
    assert plan.decode == (first, second), "the row of the finished request is part of the rectangle"
    assert plan.prefill == ()
    second.finish("eos")
    assert bench.begin() == ["r2", "r3"]
    assert (first.slot, second.slot) == (None, None)


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_a_member_that_is_cancelled_or_fails_keeps_its_row(how: str, bench: Bench) -> None:
    first, second = bench.add(3, 3)
    bench.step()
    first.cancel() if how == "cancel" else first.fail(RuntimeError("boom"))
    assert bench.begin() == ["r0", "r1"]
    assert bench.scheduler.plan().decode == (first, second)
    second.finish("eos")
    assert bench.begin() == []


def test_prompts_are_computed_first(bench: Bench) -> None:
    bench.add(3, 3)
    assert bench.step() == ([], [("r0", 0, 3), ("r1", 0, 3)])
    assert bench.step() == (["r0", "r1"], [])
