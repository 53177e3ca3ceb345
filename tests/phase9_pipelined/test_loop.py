"""The order in which steps are launched, executed and read, on a stream that runs work when the test says so."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from common.constrained.grammar import Grammar
from common.engine.engine import Engine
from common.engine.runner import Launched
from common.engine.scheduling import StepPlan
from common.errors import RequestTimeoutError
from common.request import Request, RequestState, StepOutput
from phase9_pipelined.state import MAX_IN_FLIGHT
from tests.support.engines import (
    EOS,
    Clock,
    RememberingModel,
    add,
    assert_all_free,
    assert_answered,
    assert_served,
    chained,
    continuation,
    end_of,
    greedy,
    run,
    tokens_of,
)
from tests.support.streams import ManualStream, engine_of, runner_of

PROMPT = [5, 9, 2]


def computed(model: RememberingModel) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(call.query_lengths, call.kv_lengths) for call in model.calls]


def started(count: int = 1, **options: Any) -> tuple[Engine, ManualStream, list[Request]]:
    """Build an engine with requests whose first step is launched."""
    engine, stream = engine_of(**options)
    requests = [add(engine, [*PROMPT, i], greedy(20)) for i in range(count)]
    assert engine.step() == []
    return engine, stream, requests


# ---------------------------------------------------------------------- how far ahead


def test_the_next_step_is_launched_before_the_last_one_is_done() -> None:
    engine, stream, (request,) = started()
    assert engine.step() == []
    assert stream.log == ["submit forward 0", "submit sample 0", "submit forward 1", "submit sample 1"]
    assert (request.inflight_refs, request.pending_tokens, len(request.token_ids)) == (2, 2, 4)
    assert runner_of(engine).pool.get_seq_len(request.slot or 0) == 5, "the device's length runs ahead"
    outputs = engine.step()
    assert tokens_of(outputs, request) == continuation(request.prompt_token_ids, 1)
    assert stream.log[4:] == [
        "wait sample 0",
        "do forward 0",
        "do sample 0",
        "submit forward 2",
        "submit sample 2",
    ], "it waits for that step and for none that came later"
    assert_served(engine, [request], outputs)


@pytest.mark.parametrize(
    ("depth", "order"),
    [
        (0, ["submit forward 1", "submit sample 1", "wait sample 1"]),
        (1, ["submit forward 1", "wait sample 0", "submit sample 1"]),
    ],
)
def test_depths_0_and_1_launch_and_commit_in_their_own_order(depth: int, order: list[str]) -> None:
    engine, stream = engine_of(pipeline_depth=depth)
    request = add(engine, PROMPT, greedy(6))
    outputs = engine.step()
    before = len(stream.log)
    outputs += engine.step()
    assert [line for line in stream.log[before:] if not line.startswith("do")] == order
    assert_served(engine, [request], outputs)


def test_with_a_penalty_sampling_waits_for_no_token() -> None:
    engine, stream = engine_of()
    request = add(engine, PROMPT, greedy(6, frequency_penalty=1e-9))
    outputs = engine.step() + engine.step()
    assert [line for line in stream.log if not line.startswith("do")][2:] == [
        "submit forward 1",
        "submit sample 1",
    ]
    assert tokens_of(outputs, request) == []
    assert_served(engine, [request], outputs)


def test_a_batch_with_a_grammar_takes_that_order_and_no_token_changes() -> None:
    engine, stream = engine_of()
    plain = add(engine, PROMPT, greedy(12))
    guided = add(engine, PROMPT, greedy(12, grammar=Grammar("regex", "[ab]{3}")))
    outputs = engine.step() + engine.step()
    assert [line for line in stream.log if not line.startswith("do")][2:5] == [
        "submit forward 1",
        "wait sample 0",
        "submit sample 1",
    ]
    outputs += run(engine)
    assert_answered(outputs, [plain])
    text = bytes(token for token in tokens_of(outputs, guided) if token < EOS).decode()
    assert len(text) == 3
    assert set(text) <= set("ab")
    assert_all_free(engine)
    late = stream.log.index("submit sample 1")
    again = [line for line in stream.log[late:] if not line.startswith("do")]
    assert any(
        first.startswith("submit sample") and second.startswith("submit forward")
        for first, second in itertools.pairwise(again)
    ), "with the guided one gone two steps are in flight again"


def test_an_empty_plan_commits_the_steps_in_flight() -> None:
    engine, stream = engine_of()
    request = add(engine, PROMPT, greedy(2))
    assert engine.step() == []
    assert engine.step() == []
    assert len(runner_of(engine).state.steps) == MAX_IN_FLIGHT
    outputs = engine.step()
    assert len(tokens_of(outputs, request)) == 1
    assert not [line for line in stream.log if line == "submit forward 2"], "its end was foreseen"
    outputs += engine.step()
    assert end_of(outputs, request).finish_reason == "length"
    assert engine.step() == []
    assert_all_free(engine)


def test_planning_changes_nothing() -> None:
    engine, stream, (request,) = started()
    steps = runner_of(engine).state.steps
    before = (request.inflight_refs, request.pending_tokens, list(stream.log), list(steps))
    assert engine.scheduler.plan() == engine.scheduler.plan() == StepPlan(decode=(request,))
    assert before == (request.inflight_refs, request.pending_tokens, stream.log, list(steps))


# ---------------------------------------------------------------------- ends


def ending_at(count: int) -> RememberingModel:
    """Return a model whose token number `count` is EOS."""

    def rule(token_ids: list[int]) -> int:
        return EOS if len(token_ids) == len(PROMPT) + count - 1 else chained(token_ids)

    return RememberingModel(rule=rule)


def test_an_end_that_was_not_foreseen_leaves_a_zombie() -> None:
    model = ending_at(3)
    engine, _ = engine_of(model)
    request = add(engine, PROMPT, greedy(20))
    outputs = [output for _ in range(5) for output in engine.step()]
    assert end_of(outputs, request).finish_reason == "eos", "its client has the answer at once"
    assert request.inflight_refs == 1, "a step that computes for it is on its way"
    assert (request.slot, len(engine.scheduler.active)) != (None, 0)
    outputs += engine.step()
    assert (request.inflight_refs, request.pending_tokens) == (0, 0)
    engine.step()
    assert request.slot is None
    assert len([output for output in outputs if output.request_id == request.request_id]) == 3
    assert_all_free(engine)


def test_no_row_is_computed_beyond_max_tokens() -> None:
    model = RememberingModel()
    engine, _ = engine_of(model)
    requests = [add(engine, [*PROMPT, i], greedy(count)) for i, count in enumerate((1, 2, 3, 5))]
    outputs = run(engine)
    assert_answered(outputs, requests)
    tokens = sum(sum(lengths) for lengths, _ in computed(model))
    assert tokens == sum(4 + each.params.max_new_tokens - 1 for each in requests), (
        "no row was computed in vain"
    )
    assert_all_free(engine)


def test_min_tokens_counts_tokens_in_flight() -> None:
    model = RememberingModel(rule=lambda _: EOS)
    engine, _ = engine_of(model)
    request = add(engine, PROMPT, greedy(20, min_tokens=3))
    outputs = run(engine)
    assert [token == EOS for token in tokens_of(outputs, request)] == [False, False, False, True]


# ---------------------------------------------------------------------- prompts


@pytest.mark.parametrize("mode", ["pipelined", "drained"])
def test_a_new_prompt_begins_within_two_commits(mode: str) -> None:
    engine, _stream, (running,) = started(1, prefill_mode=mode, prefill_chunk_size=4)
    engine.step()
    newcomer = add(engine, [3] * 6, greedy(4))
    outputs = []
    steps = 0
    while not newcomer.has_begun:
        outputs += engine.step()
        steps += 1
        assert steps <= 3
    done = len(tokens_of(outputs, running))
    assert done <= 2
    if mode == "drained":
        assert len(runner_of(engine).state.steps) == 1, "alone in flight: what came before has been read"
    assert_served(engine, [running, newcomer], outputs)


def test_blocks_are_shared_once_their_step_is_committed() -> None:
    engine, _ = engine_of(block_size=4)
    text = [(3 * i) % 200 for i in range(12)]
    first = add(engine, text, greedy(3))
    engine.step()
    early = add(engine, text, greedy(3))
    outputs = engine.step()
    assert early.cached_tokens == 0, "on its way, and nobody has seen whether it is sound"
    outputs += run(engine)
    late = add(engine, text, greedy(3))
    outputs += run(engine)
    assert late.cached_tokens == 8
    assert_answered(outputs, [first, early, late])
    assert_all_free(engine)


def test_a_prompt_with_scores_waits_for_the_steps_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _, _ = started()
    engine.step()
    runner = runner_of(engine)
    in_flight: list[int] = []

    def executed(_: StepPlan) -> list[StepOutput]:
        in_flight.append(len(runner.state.steps))
        return []

    monkeypatch.setattr(runner, "_execute_now", executed)
    add(engine, [3] * 4, greedy(3, prompt_logprobs=1))
    engine.step()
    assert in_flight == [0]


def test_a_step_leaves_the_queue_only_once_it_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = started()
    engine.step()
    runner = runner_of(engine)
    commit, in_flight = runner.commit, []

    def noting(launched: Launched) -> list[StepOutput]:
        in_flight.append(len(runner.state.steps))
        return commit(launched)

    monkeypatch.setattr(runner, "commit", noting)
    engine.step()
    assert in_flight == [2], "an interrupted commit finds its step in the queue, and its requests are rewound"


# ---------------------------------------------------------------------- memory


def test_no_request_is_preempted_while_steps_are_in_flight() -> None:
    """Two requests need the last block. All steps are read before one of them is preempted, and only one is."""
    engine, _stream = engine_of(block_size=4, num_blocks=6, max_batch_size=2, max_seq_len=24)
    requests = [add(engine, [9, i, 9], greedy(14)) for i in range(2)]
    outputs = []
    while engine.has_work:
        before = engine.scheduler.preemptions
        flying = len(runner_of(engine).state.steps)
        outputs += engine.step()
        if engine.scheduler.preemptions > before:
            assert flying <= 1, "the last of them was read at the beginning of this step"
    assert engine.scheduler.preemptions == 1
    assert_answered(outputs, requests)
    assert_all_free(engine)


# ---------------------------------------------------------------------- pause


def test_a_pause_plans_nothing_and_the_tokens_in_flight_are_delivered() -> None:
    engine, _, requests = started(3)
    seen: list[tuple[StepPlan, list[StepOutput]]] = []
    engine.watchers.append(lambda _record, plan, outputs: seen.append((plan, list(outputs))))
    engine.step()
    engine.pause()
    assert engine.is_due, "two steps are in flight"
    outputs = engine.step() + engine.step()
    assert (runner_of(engine).in_flight, engine.next_wake()) == (False, None)
    assert all(len(tokens_of(outputs, each)) == 2 for each in requests)
    assert [told for plan, step in seen[1:] if plan == StepPlan() for told in step] == outputs
    late = add(engine, [1, 2], greedy(3))
    assert (engine.next_wake(), engine.step(), late.state) == (None, [], RequestState.WAITING)
    engine.resume()
    assert engine.is_due
    outputs += run(engine)
    assert_answered(outputs, requests)
    assert tokens_of(outputs, late) == continuation([1, 2], 3)
    assert_all_free(engine)


def test_a_request_runs_out_of_time_during_a_pause() -> None:
    clock = Clock()
    engine, _ = engine_of(clock=clock, request_timeout=5.0)
    request = add(engine, PROMPT, greedy(9))
    engine.step()
    engine.pause()
    outputs = engine.step()
    assert (engine.next_wake(), engine.is_due) == (clock.now + 5.0, False)
    clock.advance(5.0)
    assert engine.is_due
    outputs += engine.step()
    assert isinstance(end_of(outputs, request).error, RequestTimeoutError)
    assert engine.next_wake() is None
    engine.resume()
    assert run(engine) == []
    assert_all_free(engine)
