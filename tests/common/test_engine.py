"""The engine's step: its order, its outputs, the ends of requests, and the requests that a failure affects.

Most engines here have a `RememberingModel` (`tests.support.engines`): a wrong address or a stale column changes its
tokens, and a test can make any pass fail. Where numbers matter, a small Llama with random weights runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.engine.engine import Engine
from common.engine.scheduling import StepPlan
from common.engine.telemetry import StepRecord
from common.errors import ContextLengthError, InvalidPromptError, InvalidRequestError
from common.models.layers import CausalLM
from common.request import RequestState, SamplingParams, StepOutput
from common.startup.phases import find_phase, phase_names
from tests.support.engines import (
    EOS,
    VOCAB,
    Clock,
    RememberingModel,
    Variant,
    add,
    assert_all_free,
    build,
    continuation,
    end_of,
    greedy,
    run,
    text_of,
    tokens_of,
)

#: Phases that finish a step before the next. `tests/phase9_pipelined` tests the order and the faults of the others.
EACH_STEP_BY_ITSELF = [
    name for name in phase_names() if "pipeline_depth" not in find_phase(name).Config.model_fields
]
STEP_BY_STEP = pytest.mark.parametrize("phase", EACH_STEP_BY_ITSELF)


@pytest.fixture(params=phase_names())
def phase(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


#: Special tokens, stop strings and stop tokens are left in the answer's text.
SHOWN: dict[str, Any] = {"skip_special_tokens": False, "include_stop_str_in_output": True}


def say(text: str) -> Callable[[list[int]], int]:
    """Return a rule: the bytes of `text` follow a prompt that ends in `:`, then EOS for ever."""

    def rule(token_ids: list[int]) -> int:
        spoken = len(token_ids) - 1 - token_ids.index(ord(":"))
        data = text.encode()
        return data[spoken] if spoken < len(data) else EOS

    return rule


# ---------------------------------------------------------------------- the step


class Trace:
    """Records the calls of an engine's parts."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for owner, names in (
            (engine.scheduler, ["retire", "make_room", "admit", "plan"]),
            (engine.runner, ["release", "execute", "launch", "commit"]),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, self._wrap(name, getattr(owner, name)))

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any) -> Any:
            self.names.append(name)
            return function(*args)

        return traced


@STEP_BY_STEP
def test_the_order_of_a_step(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(phase)
    trace = Trace(engine, monkeypatch)
    add(engine, "hello", greedy(3))
    engine.step()
    assert trace.names == ["retire", "release", "make_room", "admit", "plan", "execute", "launch", "commit"]


# ---------------------------------------------------------------------- determinism


def play(phase: str, model: CausalLM, seed: int) -> list[tuple[str, int | None, str]]:
    """Serve five requests. Phases with blocks get memory for little more than one request."""
    engine = Variant.of(phase, block_size=2, num_blocks=8).build(model, seed=seed, max_batch_size=2)
    for i in range(5):
        params = SamplingParams(max_new_tokens=8, seed=3 if i == 4 else None, top_k=20 if i % 2 else None)
        add(engine, [10 + i, 20, 30], params, f"r{i}")
    outputs = [(o.request_id, o.token_id, o.text_delta) for o in run(engine)]
    assert (engine.scheduler.preemptions > 0) == ("num_blocks" in find_phase(phase).Config.model_fields)
    return outputs


def test_the_engines_seed_and_the_queue_decide_everything(phase: str, llama: CausalLM) -> None:
    first = play(phase, llama, seed=1)
    assert play(phase, llama, seed=1) == first
    other = play(phase, llama, seed=2)
    assert [o for o in other if o[0] == "r0"] != [o for o in first if o[0] == "r0"]
    assert [o[:2] for o in other if o[0] == "r4"] == [o[:2] for o in first if o[0] == "r4"], "it has a seed"


# ---------------------------------------------------------------------- how requests end


@pytest.mark.parametrize(
    ("said", "params", "text", "reason", "count"),
    [
        ("hi", greedy(9), "hi", "eos", 3),
        ("hi", greedy(9, ignore_eos=True), "hi", "length", 9),
        ("hi there", greedy(4), "hi t", "length", 4),
        ("hi there", greedy(1), "h", "length", 1),
        ("", greedy(1), "", "eos", 1),
        ("hi there", greedy(9, stop=("the",)), "hi ", "stop", 6),
        ("hi there", greedy(9, stop=("the",), min_tokens=5), "hi ", "stop", 6),
        ("hi there", greedy(9, stop=("the",), min_tokens=6), "hi there", "eos", 9),
        ("the these", greedy(9, stop=("the",), min_tokens=4), "the ", "stop", 7),
        ("hi there", greedy(9, stop_token_ids=(ord("e"),)), "hi th", "stop", 6),
        ("hi there", greedy(9, stop_token_ids=(ord("h"),)), "", "stop", 1),
        ("hi", greedy(9, stop_token_ids=(EOS,)), "hi", "stop", 3),
        # EOS comes before length, a stop string too.
        ("hi", greedy(3), "hi", "eos", 3),
        ("hi", greedy(2, stop=("hi",)), "", "stop", 2),
        # EOS comes before a stop string that its own text completes.
        ("hi", greedy(9, stop=("<eos>",), **SHOWN), "hi<eos>", "eos", 3),
        # Text held back for a stop string that never came is in the last output.
        ("hi th", greedy(9, stop=("the",)), "hi th", "eos", 6),
        ("hi there", greedy(5, stop=("the",)), "hi th", "length", 5),
        # Half a character at the end is dropped.
        ("hi 😀", greedy(5), "hi ", "length", 5),
        ("hi 😀", greedy(7), "hi 😀", "length", 7),
    ],
)
def test_finish(phase: str, said: str, params: SamplingParams, text: str, reason: str, count: int) -> None:
    engine = build(phase, RememberingModel(rule=say(said)))
    request = add(engine, "p:", params)
    outputs = run(engine)
    end = end_of(outputs, request)
    assert (text_of(outputs, request), end.finish_reason, end.completion_tokens) == (text, reason, count)
    assert end.error is None
    assert end.token_id is not None, "the token that ends a request is its own output's"


# ---------------------------------------------------------------------- cancelling


@STEP_BY_STEP
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_gives_one_terminal_output(phase: str, steps: int) -> None:
    """The request is cancelled while it waits, after its prefill, or while it decodes."""
    engine = build(phase)
    request = add(engine, "hello", greedy(9))
    outputs = [o for _ in range(steps) for o in engine.step()]
    engine.cancel(request.request_id)
    engine.cancel(request.request_id)
    assert engine.has_work
    assert engine.next_wake() == engine.clock()
    outputs += run(engine)
    end = end_of(outputs, request)
    assert (end.finish_reason, end.error, end.token_id) == ("cancelled", None, None)
    assert (end.completion_tokens, len(outputs)) == (steps, steps + 1)
    engine.step()
    assert_all_free(engine)
    assert engine.telemetry.counters.requests_cancelled == 1


def test_cancelling_a_finished_or_unknown_request_does_nothing(phase: str) -> None:
    engine = build(phase)
    request = add(engine, "hello", greedy(2))
    outputs = run(engine)
    engine.cancel(request.request_id)
    engine.cancel("nobody")
    outputs += run(engine)
    assert end_of(outputs, request).finish_reason == "length"
    assert request.state is RequestState.FINISHED


def test_an_id_is_free_again_once_its_request_has_ended(phase: str) -> None:
    engine = build(phase)
    add(engine, "a", greedy(1), "same")
    with pytest.raises(ValueError, match="'same' is in use"):
        engine.add_request(engine.maker.create("b", greedy(1), "same"))
    run(engine)
    add(engine, "b", greedy(1), "same")
    assert len(run(engine)) == 1


def test_abort_all_answers_everyone_and_frees_their_memory(phase: str) -> None:
    engine = build(phase, max_batch_size=2)
    requests = [add(engine, text, greedy(9)) for text in ("one", "two", "waits", "leaves")]
    engine.step()
    engine.cancel(requests[3].request_id)
    error = RuntimeError("shutting down")
    outputs = engine.abort_all(error)
    assert [end_of(outputs, request).error for request in requests] == [error, error, error, None]
    assert end_of(outputs, requests[3]).finish_reason == "cancelled"
    assert run(engine) == []
    assert_all_free(engine)


# ---------------------------------------------------------------------- telemetry


def counts(engine: Engine) -> list[tuple[int, ...]]:
    return [
        (r.passes, r.prefill_tokens, r.decode_tokens, r.padded_tokens, r.idle_rows, r.kv_used_tokens)
        for r in engine.telemetry.records
    ]


def test_counts_of_a_rectangle_worked_by_hand() -> None:
    """Prompts of 2, 5 and 3 tokens with 1, 3 and 2 new ones; rows are 5 + 3 long."""
    clock = Clock()
    engine = build("static", clock=clock)
    for prompt, new in ((b"ab", 1), (b"abcde", 3), (b"abc", 2)):
        add(engine, prompt, greedy(new))
    run(engine)
    assert counts(engine) == [
        (1, 10, 0, 3 + 0 + 2, 0, 10),
        (1, 0, 2, 0, 1, 12),
        (1, 0, 1, 0, 2, 13),
        (0, 0, 0, 0, 0, 0),
    ]
    assert [r.kv_reserved_tokens for r in engine.telemetry.records] == [24, 24, 24, 0]
    assert [(r.waiting, r.active) for r in engine.telemetry.records] == [(0, 3)] * 3 + [(0, 0)]
    counters = engine.telemetry.counters
    assert (counters.steps, counters.passes) == (4, 3)
    assert (counters.prefill_tokens, counters.decode_tokens) == (10, 3)
    assert (counters.padded_tokens, counters.idle_rows) == (5, 3)
    assert (counters.requests_added, counters.requests_finished) == (3, 3)


def test_times_are_the_clocks() -> None:
    clock = Clock()
    model = RememberingModel(before_pass=lambda _: clock.advance(0.25))
    engine = build("continuous", model, clock=clock)
    add(engine, "a", greedy(2))
    run(engine)
    assert [(r.started_s, r.duration_s) for r in engine.telemetry.records] == [
        (100.0, 0.25),
        (100.25, 0.25),
        (100.5, 0.0),
    ]
    assert engine.telemetry.counters.busy_s == 0.5


def test_a_pause_after_a_step_was_begun_is_not_counted_as_its_time(phase: str) -> None:
    clock = Clock()
    engine = build(phase, clock=clock)
    request = add(engine, "a", greedy(4))
    outputs = engine.step()
    engine.wait()
    engine.pause()
    while engine.is_due:
        outputs += engine.step()
    clock.advance(60.0)
    engine.resume()
    outputs += run(engine)
    assert tokens_of(outputs, request) == continuation(request.prompt_token_ids, 4)
    assert {record.duration_s for record in engine.telemetry.records} == {0.0}


def test_a_reset_after_a_step_was_begun_leaves_a_record_without_requests(phase: str) -> None:
    engine = build(phase)
    request = add(engine, "a", greedy(2))
    while not request.is_terminal:
        engine.step()
    engine.wait()
    engine.reset_prefix_cache()
    while engine.is_due:
        engine.step()
    assert engine.telemetry.latest is not None
    assert engine.telemetry.latest.active == 0


# ---------------------------------------------------------------------- checking requests


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param"),
    [
        ("", greedy(4), InvalidPromptError, "prompt"),
        ([], greedy(4), InvalidPromptError, "prompt"),
        ([1, VOCAB], greedy(4), InvalidPromptError, "prompt"),
        ([-1], greedy(4), InvalidPromptError, "prompt"),
        ([1] * 64, greedy(1), ContextLengthError, "prompt"),
        ("x" * 64, greedy(1), ContextLengthError, "prompt"),
        ("x" * 10_000, greedy(1), ContextLengthError, "prompt"),
        ([1] * 60, greedy(5), ContextLengthError, "max_tokens"),
        ([1], greedy(4, stop_token_ids=(VOCAB,)), InvalidRequestError, "stop_token_ids"),
        ([1], greedy(4, stop_token_ids=(-1,)), InvalidRequestError, "stop_token_ids"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    phase: str, prompt: Any, params: SamplingParams, error: type[InvalidRequestError], param: str
) -> None:
    with pytest.raises(error) as caught:
        build(phase).maker.create(prompt, params)
    assert type(caught.value) is error
    assert caught.value.param == param


def test_a_request_may_fill_the_whole_sequence(phase: str) -> None:
    engine = build(phase)
    request = add(engine, [1] * 60, greedy(4))
    other = add(engine, [2], greedy(63))
    outputs = run(engine)
    assert len(tokens_of(outputs, request)) == 4
    assert tokens_of(outputs, other) == continuation([2], 63)


# ---------------------------------------------------------------------- watchers


def test_a_watcher_that_raises_is_removed_and_the_steps_outputs_are_not_lost(
    phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(phase)
    seen: list[StepOutput] = []

    def broken(*_: object) -> None:
        raise LookupError("a watcher's own mistake")

    engine.watchers += [broken, lambda _record, _plan, outputs: seen.extend(outputs)]
    request = add(engine, "abc", greedy(3))
    outputs = run(engine)
    assert tokens_of(outputs, request) == continuation(b"abc", 3)
    assert seen == outputs, "the other watchers are called all the same"
    assert len(engine.watchers) == 1
    assert [record.exc_info is not None for record in caplog.records] == [True], "logged once"


def test_watchers_see_every_step(phase: str) -> None:
    engine = build(phase)
    seen: list[tuple[StepRecord, StepPlan, list[StepOutput]]] = []
    engine.watchers.append(lambda record, plan, outputs: seen.append((record, plan, list(outputs))))
    request = add(engine, "abc", greedy(3))
    outputs = run(engine)

    assert [record for record, _, _ in seen] == list(engine.telemetry.records)
    assert [output for _, _, told in seen for output in told] == outputs
    planned = [chunk for _, plan, _ in seen for chunk in plan.prefill if chunk.request is request]
    assert [(chunk.start, chunk.end) for chunk in planned] == [(0, 3)]
    assert sum(request in plan.decode for _, plan, _ in seen) == 2
