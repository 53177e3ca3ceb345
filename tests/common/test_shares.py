"""Groups of requests, such as the choices of one answer, share seats with others."""

from __future__ import annotations

import pytest

from common.engine import Engine
from common.phases import phase_names
from common.request import Request
from tests.engine_helpers import assert_all_free, build, continuation, greedy, run, tokens_of

SEATS = 4


def add(engine: Engine, prompt: list[int], group: str, new_tokens: int = 4) -> Request:
    request = engine.create_request(prompt, greedy(new_tokens), group=group)
    assert engine.add_request(request)
    return request


def engine_of(phase: str) -> Engine:
    options = {"batch_wait_timeout_s": 0.0} if phase == "phase4_static" else {}
    return build(phase, max_batch_size=SEATS, max_waiting_requests=32, **options)


def groups_at_work(engine: Engine) -> list[str]:
    return sorted(request.group for request in engine.scheduler.active)


@pytest.mark.parametrize("phase", phase_names())
def test_a_group_leaves_seats_to_those_who_came_later(phase: str) -> None:
    engine = engine_of(phase)
    many = [add(engine, [5, i], "many") for i in range(8)]
    others = [add(engine, [9, i], f"other {i}") for i in range(3)]
    engine.step()
    assert groups_at_work(engine) == ["many", "other 0", "other 1", "other 2"]
    outputs = run(engine)
    for request in (*many, *others):
        if phase != "phase9_pipelined" or request in many[1:]:  # the first step's outputs are not among these
            assert tokens_of(outputs, request)[-1:] == continuation(request.prompt_token_ids, 4)[-1:]
    assert_all_free(engine)


@pytest.mark.parametrize("phase", phase_names())
def test_free_seats_are_a_groups_when_nobody_else_waits(phase: str) -> None:
    engine = engine_of(phase)
    requests = [add(engine, [5, i], "many") for i in range(6)]
    requests.append(add(engine, [9], "other"))
    engine.step()
    assert groups_at_work(engine) == ["many"] * 3 + ["other"]
    outputs = run(engine)
    assert all(tokens_of(outputs, request) for request in requests)
    assert_all_free(engine)


def test_those_of_one_group_keep_their_order() -> None:
    engine = engine_of("phase5_continuous")
    many = [add(engine, [5, i], "many") for i in range(3)]
    single = [add(engine, [9, i], "") for i in range(3)]
    engine.step()
    assert engine.scheduler.active == [many[0], *single]
    assert list(engine.scheduler.waiting) == many[1:]
    run(engine)
    assert_all_free(engine)
