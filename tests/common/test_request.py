"""A request's defaults, its random numbers, and the states it may go through."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from common.request import IllegalTransitionError, Request, RequestState, SamplingParams

State = RequestState

MOVES: dict[str, tuple[Callable[[Request], None], State]] = {
    "start_prefill": (lambda r: r.start_prefill(), State.PREFILL),
    "start_decode": (lambda r: r.start_decode(), State.DECODE),
    "preempt": (lambda r: r.preempt(), State.WAITING),
    "finish": (lambda r: r.finish("length"), State.FINISHED),
    "fail": (lambda r: r.fail(RuntimeError("boom")), State.FAILED),
    "cancel": (lambda r: r.cancel(), State.CANCELLED),
}
ROAD_TO: dict[State, list[str]] = {
    State.WAITING: [],
    State.PREFILL: ["start_prefill"],
    State.DECODE: ["start_prefill", "start_decode"],
    State.FINISHED: ["start_prefill", "start_decode", "finish"],
    State.FAILED: ["fail"],
    State.CANCELLED: ["cancel"],
}
#: How each end is recorded: a reason, and an error's text.
ENDS: dict[State, tuple[str | None, str]] = {
    State.FINISHED: ("length", "None"),
    State.FAILED: (None, "boom"),
    State.CANCELLED: ("cancelled", "None"),
}
LEGAL = {
    (State.WAITING, "start_prefill"),
    (State.WAITING, "fail"),
    (State.WAITING, "cancel"),
    (State.PREFILL, "start_decode"),
    (State.PREFILL, "preempt"),
    (State.PREFILL, "fail"),
    (State.PREFILL, "cancel"),
    (State.DECODE, "preempt"),
    (State.DECODE, "finish"),
    (State.DECODE, "fail"),
    (State.DECODE, "cancel"),
}


def make(prompt: list[int] | None = None, **values: Any) -> Request:
    return Request("r", prompt or [1, 2, 3], SamplingParams(**values))


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("state", State)
def test_every_transition(state: State, move: str) -> None:
    request = make()
    for step in ROAD_TO[state]:
        MOVES[step][0](request)
    assert request.state is state
    before = (request.finish_reason, request.error)
    act, target = MOVES[move]
    if (state, move) in LEGAL:
        act(request)
        assert request.state is target
        assert (request.finish_reason, str(request.error)) == ENDS.get(target, (None, "None"))
        assert request.is_terminal == (target in ENDS)
    else:
        with pytest.raises(IllegalTransitionError, match=f"{state.value} does not lead to {target.value}"):
            act(request)
        assert request.state is state
        assert (request.finish_reason, request.error) == before


# ---------------------------------------------------------------------- random numbers


def uniforms(request: Request, count: int) -> list[float]:
    drawn = []
    for _ in range(count):
        drawn.append(request.next_uniform())
        request.token_ids.append(0)
    return drawn


@pytest.mark.parametrize("seed", [5, -(2**63), -1, 0, 2**63, 2**64 - 1])
def test_a_seed_decides_the_numbers(seed: int) -> None:
    first = uniforms(make(seed=seed), 10)
    assert first == uniforms(make(seed=seed), 10)
    assert first != uniforms(make(seed=6), 10)
    assert all(0.0 <= u < 1.0 for u in first)
    assert len(set(first)) == 10
    reseeded = make(seed=6)
    assert reseeded.next_uniform() == reseeded.next_uniform()
    reseeded.sampling.seed(seed)
    assert uniforms(reseeded, 10) == first


def test_a_retry_and_a_preemption_draw_the_same_random_numbers() -> None:
    expected = uniforms(make(seed=5), 6)
    request = make(seed=5)
    request.start_prefill()
    request.start_decode()
    assert uniforms(request, 3) == expected[:3]
    request.next_uniform()  # a pass that failed after its draw
    request.preempt()
    request.start_prefill()
    assert uniforms(request, 3) == expected[3:]


# ---------------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", 0),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("max_new_tokens", 0),
        ("stop", ("",)),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("min_tokens", -1),
        ("min_tokens", 129),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} is out of range"):
        SamplingParams(**{field: value})


def test_ending_token_ids() -> None:
    eos = frozenset({10, 11})

    def endings(**values: Any) -> frozenset[int]:
        return Request("r", [1], SamplingParams(**values), eos).ending_token_ids

    assert endings() == {10, 11}
    assert endings(ignore_eos=True) == set()
    assert endings(stop_token_ids=(3,)) == {3, 10, 11}
    assert endings(ignore_eos=True, stop_token_ids=(3, 10)) == {3, 10}
