"""Admission and retirement in every step: who runs, who waits, who leaves."""

from __future__ import annotations

import pytest
import torch

from common.kv import KVShape
from common.request import Request, RequestState
from phase5_continuous import Config, Scheduler
from phase5_continuous.cache import SlottedKVCache
from tests.engine_helpers import (
    CPU,
    Clock,
    RememberingModel,
    add,
    assert_all_free,
    build,
    continuation,
    end_of,
    greedy,
    run,
    tokens_of,
)


class Bench:
    """A scheduler and its pool, stepped without a runner."""

    def __init__(self, *, size: int = 2, waiting: int = 8) -> None:
        self.clock = Clock()
        config = Config(max_batch_size=size, max_waiting_requests=waiting, max_seq_len=16)
        self.scheduler = Scheduler(config, self.clock)
        self.pool = SlottedKVCache(config, KVShape(1, 1, 1, torch.float32), CPU)
        self.made = 0

    def add(self, count: int = 1) -> list[Request]:
        requests = [Request(f"r{self.made + i}", [1, 2, 3], greedy(4)) for i in range(count)]
        self.made += count
        for request in requests:
            assert self.scheduler.add_request(request)
        return requests

    def step(self) -> tuple[list[str], list[str]]:
        """What the engine does before `execute`: ids of those who decode and of those who are prefilled."""
        for request in self.scheduler.retire():
            self.pool.release(request)
        self.scheduler.make_room(self.pool)
        self.scheduler.admit(self.pool)
        plan = self.scheduler.plan()
        for chunk in plan.prefill:
            assert (chunk.start, chunk.end, chunk.is_last) == (0, 3, True)
            chunk.request.start_decode()
        return [r.request_id for r in plan.decode], [c.request.request_id for c in plan.prefill]


def test_one_who_arrives_is_prefilled_in_the_next_step() -> None:
    bench = Bench(size=3)
    bench.add(1)
    assert bench.step() == ([], ["r0"])
    bench.add(1)
    assert bench.step() == (["r0"], ["r1"])
    assert bench.step() == (["r0", "r1"], [])


def test_one_who_is_done_leaves_in_the_next_step_and_the_first_who_waits_gets_the_seat() -> None:
    bench = Bench(size=2)
    first, second, *_ = bench.add(4)
    assert bench.step() == ([], ["r0", "r1"])
    assert bench.step() == (["r0", "r1"], [])
    second.finish("length")
    assert bench.step() == (["r0"], ["r2"])
    first.finish("length")
    assert bench.step() == (["r2"], ["r3"])
    assert bench.scheduler.num_waiting == 0


def test_no_more_than_the_batch_run() -> None:
    bench = Bench(size=2, waiting=8)
    bench.add(7)
    bench.step()
    assert (len(bench.scheduler.active), bench.scheduler.num_waiting) == (2, 5)
    assert bench.pool.free_slot_count() == 0


def test_first_come_first_served() -> None:
    bench = Bench(size=2)
    bench.add(8)
    order: list[str] = []
    while bench.scheduler.has_work:
        order += bench.step()[1]
        for request in bench.scheduler.active:
            request.finish("length")
    assert order == [f"r{i}" for i in range(8)]


def test_free_seats_count_as_room() -> None:
    """`max_waiting_requests` 4, batch 2, 8 sent at once: 6 accepted."""
    bench = Bench(size=2, waiting=4)
    requests = [Request(str(i), [1, 2, 3], greedy(1)) for i in range(8)]
    assert [bench.scheduler.add_request(r) for r in requests] == [True] * 6 + [False] * 2
    assert bench.scheduler.queue_room() == 0
    bench.step()
    assert (bench.scheduler.num_waiting, bench.scheduler.queue_room()) == (4, 0)
    requests[0].finish("length")
    bench.step()
    assert bench.scheduler.queue_room() == 1


def test_has_work_and_next_wake() -> None:
    bench = Bench()
    assert not bench.scheduler.has_work
    assert bench.scheduler.next_wake(5.0) is None
    (request,) = bench.add(1)
    assert bench.scheduler.has_work
    assert bench.scheduler.next_wake(5.0) == 5.0, "there is no timer"
    bench.step()
    assert bench.scheduler.next_wake(5.0) == 5.0
    request.finish("length")
    assert bench.scheduler.has_work
    bench.step()
    assert not bench.scheduler.has_work


def test_a_plan_changes_nothing() -> None:
    bench = Bench()
    bench.add(2)
    bench.scheduler.retire()
    bench.scheduler.admit(bench.pool)
    plan = bench.scheduler.plan()
    assert bench.scheduler.plan() == plan
    bench.scheduler.active[0].start_decode()
    assert len(plan.prefill) == 2
    assert plan.decode == ()


def test_the_queue_stops_at_one_who_finds_no_memory() -> None:
    """Nobody overtakes, even where a later one would fit."""
    bench = Bench(size=4)
    slots = [bench.pool.allocate_slot() for _ in range(3)]
    bench.add(2)
    assert bench.step() == ([], ["r0"])
    assert bench.step() == (["r0"], [])
    bench.pool.free_slot(slots[0])
    assert bench.step() == (["r0"], ["r1"])


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode"])
def test_one_who_is_cancelled_is_out_in_the_next_step(state: str) -> None:
    bench = Bench(size=1)
    first, second = bench.add(2)
    target = second if state == "waiting" else first
    if state != "waiting":
        bench.scheduler.admit(bench.pool)
    if state == "decode":
        first.start_decode()
    target.cancel()
    decode, prefill = bench.step()
    assert target.request_id not in decode + prefill
    assert target.slot is None
    assert prefill == (["r0"] if state == "waiting" else ["r1"])


# ---------------------------------------------------------------------- with an engine


def test_short_requests_overtake_long_ones() -> None:
    """Prompts of 32, 128, 256, 512 with outputs of 16, 32, 64, 128 finish in that order, whatever theirs."""
    engine = build("continuous", RememberingModel(), max_seq_len=640)
    sizes = [(512, 128), (128, 32), (256, 64), (32, 16)]
    requests = {new: add(engine, [new % 250] * prompt, greedy(new)) for prompt, new in sizes}
    outputs = run(engine)
    ends = [o.completion_tokens for o in outputs if o.finished]
    assert ends == [16, 32, 64, 128]
    for new, request in requests.items():
        assert tokens_of(outputs, request) == continuation(request.prompt_token_ids, new)


def test_nobody_starves() -> None:
    engine = build("continuous", max_batch_size=4)
    requests = [add(engine, [i], greedy(3 + 5 * (i % 3))) for i in range(12)]
    outputs = run(engine)
    first_tokens = [output.request_id for output in outputs if output.completion_tokens == 1]
    assert first_tokens == [request.request_id for request in requests]
    for request in requests:
        assert end_of(outputs, request).finish_reason == "length"
    assert_all_free(engine)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_frees_the_slot_within_two_steps(steps: int) -> None:
    engine = build("continuous", max_batch_size=1)
    request, after = add(engine, "one", greedy(20)), add(engine, "two", greedy(2))
    outputs = [o for _ in range(steps) for o in engine.step()]
    engine.cancel(request.request_id)
    outputs += engine.step()
    assert end_of(outputs, request).finish_reason == "cancelled"
    assert request.slot is None
    assert after.state is RequestState.DECODE, "it was prefilled in the step that freed the slot"
    outputs += engine.step()
    assert tokens_of(outputs, after) == continuation(b"two", 2)
