"""Rules for the schedulers of all phases: their queues, their plans, and when they have work."""

from __future__ import annotations

import pytest

from common.engine.requests import Handling
from common.errors import InvalidRequestError
from common.request import RequestState
from common.startup.phases import phase_names, phase_number
from tests.support.engines import (
    Bench,
    RememberingModel,
    Variant,
    assert_all_free,
    assert_answered,
    build,
    greedy,
    run,
)

PAGED = [name for name in phase_names() if phase_number(name) >= 6]

#: Options under which memory is ample, chunks are short and batches form at once. A phase gets those that it has.
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


# ---------------------------------------------------------------------- priorities


@pytest.fixture
def ranked(bench: Bench) -> Bench:
    """A bench of a phase that has priorities."""
    if not bench.scheduler.has_priorities:
        pytest.skip("requests are served in the order of their arrival")
    return bench


def test_a_preempted_request_goes_before_all_others(ranked: Bench) -> None:
    preempted, *_ = ranked.add(3, 3, priority=7)
    ranked.begin()
    ranked.add(3, priority=-1)
    ranked.pool.release(*ranked.scheduler._make_way(preempted))
    ranked.add(3, priority=-5)
    assert ranked.waiting == ["r0", "r3", "r2"]
    assert ranked.admitted() == ["r0"]


@pytest.mark.parametrize("phase", PAGED)
def test_the_last_in_line_gives_its_memory_up(phase: str) -> None:
    """The request with the worst priority is preempted, not the latest arrival, whose priority is better."""
    bench = Variant(phase, {"block_size": 1, "num_blocks": 8}).bench(max_batch_size=2, max_seq_len=8)
    bench.hold(4).priority = 3
    bench.hold(4)
    assert bench.active == ["r0", "r1"]
    for request in bench.scheduler.active:
        request.token_ids.append(1)
    bench.make_room()
    assert (bench.active, bench.waiting) == (["r1"], ["r0"])


@pytest.mark.parametrize("phase", phase_names())
def test_requests_of_mixed_priorities_end_in_the_order_of_their_rank(phase: str) -> None:
    engine = build(phase, max_batch_size=1, max_waiting_requests=8)
    priorities = [0, 2, -1, 2, 0, 1]
    if not engine.scheduler.has_priorities:
        with pytest.raises(
            InvalidRequestError, match="phase4_static serves requests as they arrive"
        ) as refused:
            engine.maker.create([1], greedy(3), handling=Handling(priority=-1))
        assert refused.value.param == "priority"
        priorities = [0] * 6
    requests = [
        engine.maker.create([i + 1, *[7] * i], greedy(3), f"r{i}", handling=Handling(priority=priority))
        for i, priority in enumerate(priorities)
    ]
    assert all(map(engine.add_request, requests))
    outputs = run(engine)
    assert_answered(outputs, requests)
    ranked = [i for _, i in sorted((priority, i) for i, priority in enumerate(priorities))]
    assert [output.request_id for output in outputs if output.finished] == [f"r{i}" for i in ranked]
    model = engine.runner.model
    assert isinstance(model, RememberingModel)
    prompts = [call.kv_lengths for call in model.calls if call.kv_lengths == call.query_lengths]
    assert prompts == [(i + 1,) for i in ranked], (
        "the model computes the prompts in this order, one after another"
    )
    assert_all_free(engine)
