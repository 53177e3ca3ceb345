"""The state machine of two slots: what leads where, and whom a step holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phase9_pipelined.state import SLOTS, PipelineError, PipelineState, Stage

FREE, LAUNCHED, SAMPLED, COMMITTING = Stage.FREE, Stage.LAUNCHED, Stage.SAMPLED, Stage.COMMITTING


@dataclass(eq=False)
class Member:
    inflight_refs: int = 0


def stages(state: PipelineState) -> tuple[Stage, ...]:
    return tuple(state.stage(slot_id) for slot_id in range(SLOTS))


def launch(state: PipelineState, slot_id: int) -> None:
    state.on_launch(slot_id, [Member()])


def sample(state: PipelineState, slot_id: int) -> None:
    state.on_pending_commit(slot_id)


def pop(state: PipelineState, _: int = 0) -> None:
    state.pop_oldest()


def complete(state: PipelineState, slot_id: int) -> None:
    state.on_step_completed(slot_id)


Move = tuple[Callable[[PipelineState, int], None], int]

#: How every situation that can be is reached.
SITUATIONS: dict[tuple[Stage, Stage], list[Move]] = {
    (FREE, FREE): [],
    (LAUNCHED, FREE): [(launch, 0)],
    (SAMPLED, FREE): [(launch, 0), (sample, 0)],
    (COMMITTING, FREE): [(launch, 0), (sample, 0), (pop, 0)],
    (SAMPLED, LAUNCHED): [(launch, 0), (sample, 0), (launch, 1)],
    (COMMITTING, LAUNCHED): [(launch, 0), (sample, 0), (launch, 1), (pop, 0)],
    (SAMPLED, SAMPLED): [(launch, 0), (sample, 0), (launch, 1), (sample, 1)],
    (COMMITTING, SAMPLED): [(launch, 0), (sample, 0), (launch, 1), (sample, 1), (pop, 0)],
    (FREE, LAUNCHED): [(launch, 1)],
    (FREE, SAMPLED): [(launch, 1), (sample, 1)],
    (FREE, COMMITTING): [(launch, 1), (sample, 1), (pop, 0)],
}

#: What leads on from there, and where to. All else is refused.
LEGAL: dict[tuple[tuple[Stage, Stage], str, int], tuple[Stage, Stage]] = {
    ((FREE, FREE), "launch", 0): (LAUNCHED, FREE),
    ((FREE, FREE), "launch", 1): (FREE, LAUNCHED),
    ((LAUNCHED, FREE), "sample", 0): (SAMPLED, FREE),
    ((SAMPLED, FREE), "launch", 1): (SAMPLED, LAUNCHED),
    ((SAMPLED, FREE), "pop", 0): (COMMITTING, FREE),
    ((COMMITTING, FREE), "launch", 1): (COMMITTING, LAUNCHED),
    ((COMMITTING, FREE), "complete", 0): (FREE, FREE),
    ((SAMPLED, LAUNCHED), "sample", 1): (SAMPLED, SAMPLED),
    ((SAMPLED, LAUNCHED), "pop", 0): (COMMITTING, LAUNCHED),
    ((COMMITTING, LAUNCHED), "sample", 1): (COMMITTING, SAMPLED),
    ((COMMITTING, LAUNCHED), "complete", 0): (FREE, LAUNCHED),
    ((SAMPLED, SAMPLED), "pop", 0): (COMMITTING, SAMPLED),
    ((COMMITTING, SAMPLED), "complete", 0): (FREE, SAMPLED),
    ((FREE, LAUNCHED), "sample", 1): (FREE, SAMPLED),
    ((FREE, SAMPLED), "launch", 0): (LAUNCHED, SAMPLED),
    ((FREE, SAMPLED), "pop", 0): (FREE, COMMITTING),
    ((FREE, COMMITTING), "launch", 0): (LAUNCHED, COMMITTING),
    ((FREE, COMMITTING), "complete", 1): (FREE, FREE),
}

MOVES = {"launch": launch, "sample": sample, "pop": pop, "complete": complete}
CASES = [
    (situation, name, slot_id)
    for situation in SITUATIONS
    for name in MOVES
    for slot_id in range(1 if name == "pop" else SLOTS)
]


def reach(situation: tuple[Stage, Stage]) -> PipelineState:
    state = PipelineState()
    for move, slot_id in SITUATIONS[situation]:
        move(state, slot_id)
    assert stages(state) == situation
    return state


@pytest.mark.parametrize(
    ("situation", "name", "slot_id"), CASES, ids=lambda case: str(getattr(case, "value", case))
)
def test_what_leads_where(situation: tuple[Stage, Stage], name: str, slot_id: int) -> None:
    state = reach(situation)
    order = state.in_order()
    expected = LEGAL.get((situation, name, slot_id))
    if expected is not None:
        MOVES[name](state, slot_id)
        assert stages(state) == expected
        return
    with pytest.raises(PipelineError):
        MOVES[name](state, slot_id)
    assert stages(state) == situation, "what is refused changes nothing"
    assert state.in_order() == order


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: "-".join(stage.value for stage in each))
def test_what_is_told_of_each(situation: tuple[Stage, Stage]) -> None:
    state = reach(situation)
    assert state.in_flight == SLOTS - situation.count(FREE)
    assert state.launched == (situation.index(LAUNCHED) if LAUNCHED in situation else None)
    assert state.committing == (situation.index(COMMITTING) if COMMITTING in situation else None)
    free = state.free_slot_id()
    assert (free is None) == (FREE not in situation)
    assert free is None or situation[free] is FREE
    assert sorted(state.in_order()) == [slot for slot in range(SLOTS) if situation[slot] is not FREE]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: "-".join(stage.value for stage in each))
def test_after_a_failure_nobody_is_held(situation: tuple[Stage, Stage]) -> None:
    state = reach(situation)
    members = [member for slot_id in range(SLOTS) for member in state.members(slot_id)]
    state.drop_all()
    assert stages(state) == (FREE, FREE)
    assert [member.inflight_refs for member in members] == [0] * len(members)
    assert (state.oldest, state.in_order()) == (None, [])
    slot_id = state.free_slot_id()
    assert slot_id is not None
    launch(state, slot_id)


def test_slots_take_turns() -> None:
    state = PipelineState()
    used = []
    for _ in range(6):
        slot_id = state.free_slot_id()
        assert slot_id is not None
        used.append(slot_id)
        launch(state, slot_id)
        sample(state, slot_id)
        complete(state, state.pop_oldest())
    assert used == [0, 1] * 3


def test_steps_are_committed_oldest_first() -> None:
    state = PipelineState()
    launched, committed = [], []
    for _ in range(10):
        slot_id = state.free_slot_id()
        if slot_id is None:
            committed.append(state.pop_oldest())
            complete(state, committed[-1])
            slot_id = state.free_slot_id()
        assert slot_id is not None
        launched.append(slot_id)
        launch(state, slot_id)
        sample(state, slot_id)
    assert committed == launched[:8]


def test_nobody_is_in_a_step_twice_nor_in_three() -> None:
    state, member = PipelineState(), Member()
    with pytest.raises(PipelineError, match="twice"):
        state.on_launch(0, [member, member])
    with pytest.raises(PipelineError, match="more than 2"):
        state.on_launch(0, [Member(inflight_refs=2)])
    assert (stages(state), member.inflight_refs) == ((FREE, FREE), 0)
    with pytest.raises(PipelineError, match="no slot 2"):
        launch(state, 2)
    with pytest.raises(PipelineError, match="no slot -1"):
        complete(state, -1)
    state.on_launch(0, [member])


class Membership(RuleBasedStateMachine):
    """Any legal history: who is in flight is who the steps' members are, and as often."""

    def __init__(self) -> None:
        super().__init__()
        self.state = PipelineState()
        self.people = [Member() for _ in range(4)]
        self.order: list[int] = []  # slots, in the order of their launch
        self.steps: dict[int, list[Member]] = {}

    @precondition(lambda self: self.state.free_slot_id() is not None and self.state.launched is None)
    @rule(chosen=st.sets(st.integers(0, 3)))
    def launch(self, chosen: set[int]) -> None:
        slot_id = self.state.free_slot_id()
        assert slot_id is not None
        self.steps[slot_id] = [self.people[i] for i in chosen]
        self.state.on_launch(slot_id, self.steps[slot_id])
        self.order.append(slot_id)

    @precondition(lambda self: self.state.launched is not None)
    @rule()
    def sample(self) -> None:
        assert self.state.launched is not None
        self.state.on_pending_commit(self.state.launched)

    @precondition(lambda self: self.state.oldest is not None and self.state.committing is None)
    @rule()
    def pop(self) -> None:
        assert self.state.pop_oldest() == self.order[0]

    @precondition(lambda self: self.state.committing is not None)
    @rule()
    def complete(self) -> None:
        slot_id = self.order.pop(0)
        self.state.on_step_completed(slot_id)
        del self.steps[slot_id]

    @precondition(lambda self: self.state.in_flight)
    @rule()
    def drop(self) -> None:
        self.state.drop_all()
        self.order, self.steps = [], {}

    @invariant()
    def references_are_members(self) -> None:
        members = list(itertools.chain.from_iterable(self.steps.values()))
        assert [each.inflight_refs for each in self.people] == [members.count(p) for p in self.people]
        assert self.state.in_order() == self.order
        assert stages(self.state).count(LAUNCHED) <= 1
        assert stages(self.state).count(COMMITTING) <= 1
        for slot_id, step in self.steps.items():
            assert list(self.state.members(slot_id)) == step


TestMembership = Membership.TestCase
TestMembership.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
