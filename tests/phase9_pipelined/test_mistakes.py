"""Mistakes that are easily made here, each of which the tests of this phase must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.request import Request
from common.scheduling import StepPlan
from phase9_pipelined.runner import PipelinedRunner
from phase9_pipelined.scheduler import PipelinedScheduler
from phase9_pipelined.slots import DecodeSlot
from phase9_pipelined.state import PipelineState
from tests.engine_helpers import add, assert_all_free, continuation, end_of, greedy, run, tokens_of
from tests.phase9_pipelined import test_loop as loop
from tests.phase9_pipelined import test_state as states
from tests.phase9_pipelined.support import Work, engine_of


def traffic(**options: Any) -> None:
    """Requests that end in every way, in little memory, and others that take their places."""
    engine, _ = engine_of(**({"block_size": 4, "num_blocks": 9, "max_batch_size": 3} | options))
    requests = [add(engine, [i, *[9] * i], greedy(3 + 3 * i)) for i in range(5)]
    outputs = engine.step() + engine.step()
    engine.cancel(requests[2].request_id)
    outputs += run(engine, limit=300)
    assert end_of(outputs, requests[2]).finish_reason == "cancelled"
    for each in (*requests[:2], *requests[3:]):
        assert tokens_of(outputs, each) == continuation(each.prompt_token_ids, each.params.max_new_tokens)
        assert (each.inflight_refs, each.pending_tokens) == (0, 0)
    assert_all_free(engine)


Check = Callable[[], None]
CHECKS: list[Check] = [
    traffic,
    loop.test_the_next_step_is_launched_before_the_last_one_is_done,
    loop.test_a_zombie_keeps_its_seat_until_its_last_step_is_read,
    loop.test_an_end_that_nobody_could_foresee_leaves_a_zombie,
    loop.test_nobody_is_preempted_in_flight,
    loop.test_nobody_gets_more_than_was_asked_for,
    loop.test_what_was_computed_is_shared_once_it_has_been_read,
    lambda: states.test_what_is_told_of_each("SS"),
]


def dropped_when_its_tokens_have_arrived(patch: pytest.MonkeyPatch) -> None:
    original = PipelinedRunner._read

    def read(self: PipelinedRunner, step: DecodeSlot) -> Any:
        results = original(self, step)
        self.state.on_step_completed(step)
        return results

    patch.setattr(PipelinedRunner, "_read", read)


def newest_committed_first(patch: pytest.MonkeyPatch) -> None:
    def oldest(self: PipelineState[DecodeSlot]) -> DecodeSlot | None:
        sampled = [step for step in self.steps if step is not self.launched]
        return sampled[-1] if sampled else None

    patch.setattr(PipelineState, "oldest", property(oldest))


def reference_dropped_at_cancel(patch: pytest.MonkeyPatch) -> None:
    original = Request.cancel

    def cancel(self: Request) -> None:
        original(self)
        self.inflight_refs = 0

    patch.setattr(Request, "cancel", cancel)


def only_committed_tokens_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "num_tokens", property(lambda self: len(self.token_ids)))


def everything_waited_for(patch: pytest.MonkeyPatch) -> None:
    original = Work.wait

    def wait(self: Work) -> Any:
        self._stream.finish()
        return original(self)

    patch.setattr(Work, "wait", wait)


def memory_given_back_with_the_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "is_done", property(lambda self: self.is_terminal))


def preempted_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PipelinedScheduler, "in_flight", property(lambda _: False))


def shared_when_launched(patch: pytest.MonkeyPatch) -> None:
    original = PipelinedRunner.launch_forward

    def launch_forward(self: PipelinedRunner, plan: StepPlan) -> None:
        original(self, plan)
        self.register_prefixes(plan)

    patch.setattr(PipelinedRunner, "launch_forward", launch_forward)


MISTAKES = [
    dropped_when_its_tokens_have_arrived,
    newest_committed_first,
    reference_dropped_at_cancel,
    only_committed_tokens_counted,
    everything_waited_for,
    memory_given_back_with_the_answer,
    preempted_in_flight,
    shared_when_launched,
]


def complaints() -> Iterator[Exception]:
    """What the checks object to."""
    for check in CHECKS:
        try:
            check()
        except Exception as error:
            yield error


def test_without_a_mistake_nothing_is_objected_to() -> None:
    assert list(complaints()) == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.__name__)
def test_each_is_caught(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    assert list(complaints())
