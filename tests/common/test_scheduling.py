"""The contract between an engine and its scheduler: a scheduler computes with integers only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine_helpers import add, assert_all_free, build, continuation, greedy, run, tokens_of


class Operators(TorchDispatchMode):
    """Notes the operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def watched(function: Callable[..., Any], operators: Operators) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with operators:
            return function(*args)

    return call


@pytest.mark.parametrize("phase", ["paged", "chunked", "prefix", "pipelined"])
def test_no_operator_of_torch_is_called_by_a_scheduler(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to preempt: phase 9's scheduler runs in a thread that must not compute."""
    engine = build(phase, block_size=2, num_blocks=12)
    operators = Operators()
    with operators:
        torch.zeros(1)
    assert operators.names.pop() == "aten.zeros.default"
    for name in ("add_request", "retire", "make_room", "admit", "plan"):
        function = getattr(engine.scheduler, name)
        monkeypatch.setattr(engine.scheduler, name, watched(function, operators))
    requests = [add(engine, [i, 1, 2, 3, 4], greedy(12)) for i in range(4)]
    outputs = run(engine)
    assert engine.scheduler.preemptions > 0
    assert operators.names == []
    for each in requests:
        assert tokens_of(outputs, each) == continuation(each.prompt_token_ids, 12)
    assert_all_free(engine)


def test_the_memory_of_a_preempted_request_is_released_where_a_retired_ones_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build("pipelined", block_size=2, num_blocks=12)
    released: list[str] = []
    release = engine.runner.release

    def noted(requests: Any) -> None:
        held = list(requests)
        released.extend(each.request_id for each in held)
        release(held)

    monkeypatch.setattr(engine.runner, "release", noted)
    for i in range(4):
        add(engine, [i, 1, 2, 3, 4], greedy(12), str(i))
    run(engine)
    assert len(released) == 4 + engine.scheduler.preemptions
