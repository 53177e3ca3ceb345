"""Faults in different places: while a step is submitted, while it computes, when its results are read."""

from __future__ import annotations

import pytest
import torch

from common.errors import EngineDeadError
from common.request import StepOutput
from tests.support.engines import (
    ALLERGEN,
    Allergic,
    RememberingModel,
    add,
    assert_all_free,
    assert_answered,
    assert_served,
    end_of,
    greedy,
    run,
)
from tests.support.streams import engine_of

PLACES = [
    f"{place}{kind} {step}"
    for place in ("", "submit ")
    for kind in ("forward", "sample")
    for step in range(4)
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_that_fails_once_is_computed_again_and_no_token_changes(place: str, depth: int) -> None:
    engine, stream = engine_of(pipeline_depth=depth, prefill_chunk_size=4)
    stream.faults[place] = RuntimeError("cosmic ray")
    requests = [add(engine, [i, *range(2 * i + 1)], greedy(7)) for i in range(3)]
    outputs = run(engine)
    assert engine.telemetry.counters.failed_passes == 1
    assert_answered(outputs, requests)
    assert_all_free(engine)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_only_requests_that_cause_a_failure_fail(depth: int) -> None:
    engine, _ = engine_of(Allergic(), pipeline_depth=depth)
    guilty = add(engine, [1, ALLERGEN, 2], greedy(5))
    others = [add(engine, [i, 7, 7], greedy(9)) for i in range(2)]
    outputs = run(engine)
    assert str(end_of(outputs, guilty).error) == "allergic"
    assert_answered(outputs, others)
    next_one = add(engine, [3, 3], greedy(4))
    assert_served(engine, [next_one])


# ---------------------------------------------------------------------- the device


class Lost(torch.AcceleratorError):
    """The error of a device whose state is unknown."""

    def __init__(self) -> None:
        RuntimeError.__init__(self, "an illegal memory access was encountered")


@pytest.mark.parametrize("place", ["forward 1", "sample 2", "submit forward 2", "submit sample 1"])
def test_a_lost_device_fails_every_request_and_none_hangs(place: str) -> None:
    engine, stream = engine_of(max_batch_size=2)
    stream.faults[place] = Lost()
    requests = [add(engine, [i, 1], greedy(6)) for i in range(4)]  # some in flight, some waiting
    outputs: list[StepOutput] = []
    while engine.dead is None:
        outputs += engine.step()
    for each in requests:
        assert isinstance(end_of(outputs, each).error, EngineDeadError)
    assert engine.next_wake() is None
    with pytest.raises(EngineDeadError):
        engine.step()


def test_a_failed_step_is_bisected_and_so_is_the_one_behind_it() -> None:
    """One guilty request of N = 16 costs 2 log2 N passes and a few. Retrying one by one would cost 2 N."""
    passes: list[int] = []

    def before_pass(sequences: list[list[int]]) -> None:
        passes.append(len(sequences))
        if any(ids[0] == ALLERGEN for ids in sequences):
            raise RuntimeError("allergic")

    engine, _ = engine_of(RememberingModel(before_pass=before_pass), max_batch_size=16)
    guilty = add(engine, [ALLERGEN, 1], greedy(5))
    others = [add(engine, [i, 1], greedy(5)) for i in range(15)]
    outputs: list[StepOutput] = []
    while not outputs:
        outputs += engine.step()
    assert passes[:2] == [16, 16], "two steps in flight"
    assert passes[2:] == [16, *[8, 4, 2, 1, 1, 2, 4, 8], 15], "the older one bisected, then the other"
    outputs += run(engine)
    assert str(end_of(outputs, guilty).error) == "allergic"
    assert_answered(outputs, others)
    assert_all_free(engine)
