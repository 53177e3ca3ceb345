"""Rules for every scheduler: it computes with integers only, keeps deadlines, and shares seats among groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.engine.engine import Engine
from common.engine.requests import Handling
from common.errors import RequestTimeoutError
from common.request import Request
from common.startup.phases import phase_names
from tests.support.engines import (
    Clock,
    add,
    assert_all_free,
    assert_answered,
    assert_served,
    build,
    continuation,
    end_of,
    greedy,
    run,
    tokens_of,
)

EVERY_PHASE = pytest.mark.parametrize("phase", phase_names())
TIGHT: dict[str, Any] = {"block_size": 2, "num_blocks": 12}

# ---------------------------------------------------------------------- the contract with the engine


class Operators(TorchDispatchMode):
    """Records the names of the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("phase", ["paged", "chunked", "prefix", "pipelined"])
def test_no_operator_of_torch_is_called_by_a_scheduler(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even preemption calls one: phase 9's scheduler runs in a thread that must not compute."""
    engine = build(phase, **TIGHT)
    operators = Operators()
    with operators:
        torch.zeros(1)
    assert operators.names.pop() == "aten::zeros"
    for name in ("add_request", "retire", "make_room", "admit", "plan"):
        function = getattr(engine.scheduler, name)

        def watched(*args: Any, function: Any = function) -> Any:
            with operators:
                return function(*args)

        monkeypatch.setattr(engine.scheduler, name, watched)
    requests = [add(engine, [i, 1, 2, 3, 4], greedy(12)) for i in range(4)]
    outputs = run(engine)
    assert engine.scheduler.preemptions > 0
    assert operators.names == []
    assert_answered(outputs, requests)
    assert_all_free(engine)


# ---------------------------------------------------------------------- deadlines

TIMED = {"max_batch_size": 2, "request_timeout": 10.0}


@EVERY_PHASE
def test_a_request_that_is_not_done_in_time_is_given_up_and_its_neighbours_are_not(phase: str) -> None:
    clock = Clock()
    engine = build(phase, clock=clock, **TIMED)
    early = [add(engine, [5, 9, i], greedy(60 - 4)) for i in range(3)]  # two compute, one waits
    outputs = [output for _ in range(6) for output in engine.step()]
    clock.advance(4.0)
    late = add(engine, [7, 8], greedy(5))
    outputs += engine.step()
    assert not any(output.finished for output in outputs)
    clock.advance(6.0)
    outputs += run(engine)
    for request in early:
        end = end_of(outputs, request)
        assert isinstance(end.error, RequestTimeoutError)
        assert "10 s" in str(end.error)
        told = tokens_of(outputs, request)
        assert told == continuation(request.prompt_token_ids, len(told))
    assert len(tokens_of(outputs, early[0])) >= 4
    assert end_of(outputs, late).finish_reason == "length"
    assert engine.telemetry.counters.requests_failed == 3
    assert_all_free(engine)
    again = add(engine, [5, 9, 1], greedy(6))
    assert_answered(outputs + run(engine), [late, again])


# ---------------------------------------------------------------------- groups, such as the choices of one answer


def add_to(engine: Engine, group: str, prompt: list[int], new_tokens: int = 4) -> Request:
    request = engine.maker.create(prompt, greedy(new_tokens), handling=Handling(group=group))
    assert engine.add_request(request)
    return request


def groups_at_work(engine: Engine) -> list[str]:
    return sorted(request.group for request in engine.scheduler.active)


@EVERY_PHASE
@pytest.mark.parametrize(("many", "others"), [(8, 3), (6, 1)])
def test_a_group_of_requests_leaves_seats_to_later_requests(phase: str, many: int, others: int) -> None:
    """A group may have all seats that no other request waits for."""
    engine = build(phase, max_batch_size=4, max_waiting_requests=32)
    requests = [add_to(engine, "many", [5, i]) for i in range(many)]
    requests += [add_to(engine, f"other {i}", [9, i]) for i in range(others)]
    outputs = engine.step()
    assert groups_at_work(engine) == ["many"] * (4 - others) + [f"other {i}" for i in range(others)]
    assert_served(engine, requests, outputs)


@EVERY_PHASE
def test_a_group_that_took_every_seat_gives_some_back_when_others_come(phase: str) -> None:
    engine = build(phase, max_batch_size=4, max_waiting_requests=32)
    many = [add_to(engine, "many", [5, i], new_tokens=20) for i in range(6)]
    outputs = [output for _ in range(6) for output in engine.step()]
    assert groups_at_work(engine) == ["many"] * 4
    others = [add_to(engine, "", [9, i], new_tokens=8) for i in range(2)]
    outputs += [output for _ in range(6) for output in engine.step()]
    is_static = phase == "phase4_static"  # a static batch runs to its end
    assert groups_at_work(engine) == (["many"] * 4 if is_static else ["", "", "many", "many"])
    assert engine.scheduler.preemptions == (0 if is_static else 2)
    assert_served(engine, [*many, *others], outputs)
