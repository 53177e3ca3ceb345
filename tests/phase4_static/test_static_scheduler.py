"""When a static batch forms, who is in it, and when it leaves: integers and a clock to turn, no model."""

from __future__ import annotations

import pytest
import torch

from common.kv import KVShape
from common.request import Request, RequestState
from phase4_static import Config, Scheduler
from phase4_static.cache import StaticKVCache
from tests.engine_helpers import CPU, Clock, greedy

WAIT_S = 0.05


class Bench:
    """A scheduler and its pool, stepped without a runner."""

    def __init__(self, *, size: int = 2, waiting: int = 8) -> None:
        self.clock = Clock()
        config = Config(
            max_batch_size=size, max_waiting_requests=waiting, max_seq_len=64, batch_wait_timeout_s=WAIT_S
        )
        self.scheduler = Scheduler(config, self.clock)
        self.pool = StaticKVCache(config, KVShape(1, 1, 1, torch.float32), CPU)
        self.made = 0

    def add(self, count: int = 1) -> list[Request]:
        requests = [Request(f"r{self.made + i}", [1, 2, 3], greedy(4)) for i in range(count)]
        self.made += count
        for request in requests:
            assert self.scheduler.add_request(request)
        return requests

    def step(self) -> list[str]:
        """What the engine does before `execute`: the ids of the batch that runs."""
        for request in self.scheduler.retire():
            self.pool.release(request)
        self.scheduler.make_room(self.pool)
        self.scheduler.admit(self.pool)
        return [request.request_id for request in self.scheduler.active]

    def prefilled(self) -> None:
        for request in self.scheduler.active:
            if request.state is RequestState.PREFILL:
                request.start_decode()

    def end(self, *requests: Request) -> None:
        self.prefilled()
        for request in requests or self.scheduler.active:
            request.finish("length")


def test_a_full_batch_forms_at_once() -> None:
    bench = Bench()
    bench.add(2)
    assert bench.scheduler.next_wake(bench.clock()) == bench.clock()
    assert bench.step() == ["r0", "r1"]


def test_a_batch_that_is_not_full_waits_for_its_time() -> None:
    bench = Bench()
    bench.add(1)
    deadline = bench.clock() + WAIT_S
    assert bench.scheduler.next_wake(bench.clock()) == deadline
    assert bench.step() == []
    bench.clock.advance(WAIT_S * 0.9)
    assert bench.scheduler.next_wake(bench.clock()) == deadline
    assert bench.step() == []
    bench.clock.now = deadline
    assert bench.scheduler.next_wake(bench.clock()) == deadline
    assert bench.step() == ["r0"]


def test_the_time_counts_from_the_first_request_not_from_the_latest() -> None:
    bench = Bench(size=3)
    bench.add(1)
    bench.clock.advance(WAIT_S * 0.8)
    bench.add(1)
    bench.clock.advance(WAIT_S * 0.2)
    assert bench.step() == ["r0", "r1"]


def test_every_batch_has_a_fresh_timer() -> None:
    bench = Bench()
    (first,) = bench.add(1)
    bench.clock.advance(WAIT_S)
    assert bench.step() == ["r0"]
    bench.end(first)
    assert bench.step() == []
    bench.clock.advance(10.0)
    bench.add(1)
    assert bench.step() == [], "the time of the batch before has nothing to do with this one"
    assert bench.scheduler.next_wake(bench.clock()) == bench.clock() + WAIT_S
    bench.clock.advance(WAIT_S)
    assert bench.step() == ["r1"]


def test_a_backlogs_time_starts_when_the_batch_before_retires() -> None:
    bench = Bench()
    bench.add(2)
    bench.step()
    bench.add(1)
    bench.clock.advance(10.0)
    assert bench.step() == ["r0", "r1"]
    bench.end()
    assert bench.step() == [], "the batch has retired just now"
    assert bench.scheduler.next_wake(bench.clock()) == bench.clock() + WAIT_S
    bench.clock.advance(WAIT_S)
    assert bench.step() == ["r2"]


def test_a_full_backlog_forms_in_the_step_in_which_the_batch_before_retires() -> None:
    bench = Bench()
    bench.add(4)
    bench.step()
    bench.end()
    assert bench.step() == ["r2", "r3"]


def test_five_requests_in_batches_of_two() -> None:
    bench = Bench()
    bench.add(5)
    batches = []
    while bench.scheduler.has_work:
        batches.append(bench.step())
        bench.end()
        bench.clock.advance(WAIT_S)
    assert [len(batch) for batch in batches if batch] == [2, 2, 1]
    assert [name for batch in batches for name in batch] == [f"r{i}" for i in range(5)], (
        "first come, first served"
    )


def test_the_queue_has_an_end() -> None:
    bench = Bench(size=2, waiting=3)
    bench.add(3)
    assert bench.scheduler.queue_room() == 0
    refused = Request("late", [1], greedy(1))
    assert not bench.scheduler.add_request(refused)
    assert (bench.scheduler.num_waiting, refused.state) == (3, RequestState.WAITING)
    assert bench.step() == ["r0", "r1"]
    assert bench.scheduler.queue_room() == 2
    assert bench.scheduler.add_request(refused)


def test_a_batch_stays_until_its_last_member_is_done() -> None:
    bench = Bench()
    first, second = bench.add(2)
    bench.add(2)
    bench.step()
    bench.end(first)
    assert bench.step() == ["r0", "r1"], "nobody joins"
    plan = bench.scheduler.plan()
    assert plan.decode == (first, second), "the row of the one who is done is part of the rectangle"
    assert plan.prefill == ()
    second.finish("eos")
    assert bench.step() == ["r2", "r3"]
    assert (first.slot, second.slot) == (None, None)


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_a_member_that_is_cancelled_or_fails_keeps_its_row(how: str) -> None:
    bench = Bench()
    first, second = bench.add(2)
    bench.step()
    bench.prefilled()
    first.cancel() if how == "cancel" else first.fail(RuntimeError("boom"))
    assert bench.step() == ["r0", "r1"]
    assert bench.scheduler.plan().decode == (first, second)
    second.finish("eos")
    assert bench.step() == []


def test_a_member_cancelled_before_its_prefill_is_part_of_the_rectangle() -> None:
    bench = Bench()
    first, second = bench.add(2)
    bench.step()
    first.cancel()
    assert [chunk.request for chunk in bench.scheduler.plan().prefill] == [first, second]


def test_one_who_is_cancelled_while_waiting_leaves_at_the_next_retirement() -> None:
    bench = Bench()
    _, second, third = bench.add(3)
    bench.step()
    fourth, fifth = bench.add(2)
    fourth.cancel()
    assert bench.scheduler.num_waiting == 3
    assert bench.scheduler.retire() == [fourth]
    assert list(bench.scheduler.waiting) == [third, fifth]
    assert second.slot is not None


def test_the_last_one_who_waits_takes_the_timer_along() -> None:
    bench = Bench()
    (first,) = bench.add(1)
    bench.clock.advance(WAIT_S * 0.9)
    first.cancel()
    assert bench.step() == []
    assert bench.scheduler.next_wake(bench.clock()) is None
    bench.clock.advance(WAIT_S * 0.1)
    bench.add(1)
    assert bench.step() == []
    assert bench.scheduler.next_wake(bench.clock()) == bench.clock() + WAIT_S


def test_has_work() -> None:
    bench = Bench()
    assert not bench.scheduler.has_work
    bench.add(2)
    assert bench.scheduler.has_work
    bench.step()
    assert bench.scheduler.has_work
    bench.end()
    assert bench.scheduler.has_work, "a batch that is done still holds its memory"
    bench.step()
    assert not bench.scheduler.has_work


def test_next_wake() -> None:
    bench = Bench()
    assert bench.scheduler.next_wake(bench.clock()) is None
    bench.add(2)
    bench.step()
    bench.clock.advance(1.0)
    assert bench.scheduler.next_wake(bench.clock()) == bench.clock()


def test_without_a_timeout_nobody_waits() -> None:
    clock = Clock()
    config = Config(max_batch_size=4, max_seq_len=64, batch_wait_timeout_s=0.0)
    scheduler = Scheduler(config, clock)
    pool = StaticKVCache(config, KVShape(1, 1, 1, torch.float32), CPU)
    request = Request("r", [1], greedy(1))
    scheduler.add_request(request)
    scheduler.retire()
    scheduler.admit(pool)
    assert scheduler.active == [request]


def test_a_plan_changes_nothing_and_prompts_come_first() -> None:
    bench = Bench()
    requests = bench.add(2)
    bench.step()
    plan = bench.scheduler.plan()
    assert [(c.request, c.start, c.end) for c in plan.prefill] == [(r, 0, 3) for r in requests]
    assert plan.decode == ()
    assert bench.scheduler.plan() == plan
    assert [request.state for request in requests] == [RequestState.PREFILL] * 2
    bench.prefilled()
    assert bench.scheduler.plan().decode == tuple(requests)
    assert plan.prefill, "a plan is a snapshot"
