"""The steps in flight: legal moves between their situations, and the requests of each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phase9_pipelined.state import MAX_IN_FLIGHT, PipelineError, PipelineState


@dataclass(eq=False)
class Member:
    inflight_refs: int = 0


@dataclass(eq=False)
class Step:
    members: list[Member] = field(default_factory=lambda: [Member()])


State = PipelineState


def launch(state: State) -> None:
    state.on_launch(Step())


def sample(state: State) -> None:
    state.on_pending_commit()


def complete_first(state: State) -> None:
    state.on_step_completed(state.steps[0] if state.steps else Step())


def complete_last(state: State) -> None:
    state.on_step_completed(state.steps[-1] if state.steps else Step())


def complete_stranger(state: State) -> None:
    state.on_step_completed(Step())


def launch_twice_the_same_request(state: State) -> None:
    member = Member()
    state.on_launch(Step([member, member]))


Move = Callable[[State], None]

#: The moves that lead to each situation. L: a launched step, S: a sampled step; the oldest comes first.
SITUATIONS: dict[str, list[Move]] = {
    "": [],
    "L": [launch],
    "S": [launch, sample],
    "SL": [launch, sample, launch],
    "SS": [launch, sample, launch, sample],
}
#: The situation after each legal move. All other moves are refused.
LEGAL: dict[tuple[str, Move], str] = {
    ("", launch): "L",
    ("L", sample): "S",
    ("S", launch): "SL",
    ("S", complete_first): "",
    ("S", complete_last): "",
    ("SL", sample): "SS",
    ("SL", complete_first): "L",
    ("SS", complete_first): "S",
}
MOVES: list[Move] = [
    launch,
    sample,
    complete_first,
    complete_last,
    complete_stranger,
    launch_twice_the_same_request,
]
CASES = [(situation, move) for situation in SITUATIONS for move in MOVES]


def situation_of(state: State) -> str:
    return "".join("L" if step is state.launched else "S" for step in state.steps)


def reach(situation: str) -> State:
    state = State()
    for move in SITUATIONS[situation]:
        move(state)
    assert situation_of(state) == situation
    return state


def named(case: object) -> str | None:
    return getattr(case, "__name__", None) or (case if isinstance(case, str) and case else "empty")


@pytest.mark.parametrize(("situation", "move"), CASES, ids=named)
def test_legal_moves_change_the_state_and_all_others_are_refused(situation: str, move: Move) -> None:
    state = reach(situation)
    steps = list(state.steps)
    references = [member.inflight_refs for step in steps for member in step.members]
    expected = LEGAL.get((situation, move))
    if expected is not None:
        move(state)
        assert situation_of(state) == expected
        return
    with pytest.raises(PipelineError):
        move(state)
    assert situation_of(state) == situation, "a refused move changes nothing"
    assert list(state.steps) == steps
    assert [member.inflight_refs for step in steps for member in step.members] == references


@pytest.mark.parametrize("situation", SITUATIONS, ids=named)
def test_after_a_failure_no_step_holds_a_request(situation: str) -> None:
    state = reach(situation)
    members = [member for step in state.steps for member in step.members]
    state.drop_all()
    assert situation_of(state) == ""
    assert [member.inflight_refs for member in members] == [0] * len(members)
    assert (state.oldest, state.launched) == (None, None)
    launch(state)
    assert situation_of(state) == "L"


def test_steps_are_committed_oldest_first() -> None:
    state = State()
    launched, committed = [], []
    for _ in range(10):
        if not state.has_room:
            assert state.oldest is not None
            committed.append(state.oldest)
            state.on_step_completed(committed[-1])
        launched.append(Step())
        state.on_launch(launched[-1])
        state.on_pending_commit()
    assert committed == launched[:8]


def test_a_request_counts_the_steps_in_flight_that_compute_for_it() -> None:
    state, member = State(), Member()
    first, second = Step([member]), Step([member])
    counts = []
    for step in (first, second):
        state.on_launch(step)
        counts.append(member.inflight_refs)
        state.on_pending_commit()
    for step in (first, second):
        state.on_step_completed(step)
        counts.append(member.inflight_refs)
    assert counts == [1, 2, 1, 0]


class Membership(RuleBasedStateMachine):
    """After any legal moves, `inflight_refs` of a request is the number of its steps in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State()
        self.people = [Member() for _ in range(4)]
        self.order: list[Step] = []  # in the order of their launch

    @precondition(lambda self: self.state.has_room and self.state.launched is None)
    @rule(chosen=st.sets(st.integers(0, 3)))
    def launch(self, chosen: set[int]) -> None:
        self.order.append(Step([self.people[i] for i in chosen]))
        self.state.on_launch(self.order[-1])

    @precondition(lambda self: self.state.launched is not None)
    @rule()
    def sample(self) -> None:
        self.state.on_pending_commit()

    @precondition(lambda self: self.state.oldest is not None)
    @rule()
    def complete(self) -> None:
        assert self.state.oldest is self.order[0]
        self.state.on_step_completed(self.order.pop(0))

    @precondition(lambda self: self.state.steps)
    @rule()
    def drop(self) -> None:
        self.state.drop_all()
        self.order = []

    @invariant()
    def references_are_members(self) -> None:
        members = list(itertools.chain.from_iterable(step.members for step in self.order))
        assert [each.inflight_refs for each in self.people] == [members.count(p) for p in self.people]
        assert list(self.state.steps) == self.order
        assert len(self.order) <= MAX_IN_FLIGHT
        assert situation_of(self.state) in SITUATIONS


TestMembership = Membership.TestCase
TestMembership.settings = settings(max_examples=60, stateful_step_count=40)
