"""The engine's step: its order, its outputs, the ends of requests, and the requests that a failure affects.

Most engines here have a `RememberingModel` (`tests.support.engines`): a wrong address or a stale column changes its
tokens, and a test can make any pass fail. Where numbers matter, a small Llama with random weights runs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import common.engine.runner
from common.engine.engine import Engine
from common.engine.scheduling import StepPlan
from common.engine.telemetry import StepRecord
from common.errors import EngineDeadError, InvalidPromptError, InvalidRequestError, NaNLogitsError
from common.models.layers import CausalLM
from common.request import Request, RequestState, SamplingParams, StepOutput
from common.sampling.draw import Sampled, sample
from common.sampling.inputs import TokenMasks
from common.startup.phases import find_phase, phase_names
from tests.support.engines import (
    EOS,
    VOCAB,
    Clock,
    RememberingModel,
    Variant,
    add,
    assert_all_free,
    assert_answered,
    build,
    continuation,
    end_of,
    greedy,
    model_config,
    run,
    solo,
    text_of,
    tiny_model,
    tokens_of,
)

#: Phases that finish a step before the next. `tests/phase9_pipelined` tests the order and the faults of the others.
EACH_STEP_BY_ITSELF = [
    name for name in phase_names() if "pipeline_depth" not in find_phase(name).Config.model_fields
]
STEP_BY_STEP = pytest.mark.parametrize("phase", EACH_STEP_BY_ITSELF)
#: Phases with flat passes: if a pass of several sequences fails, its parts can be tried.
FLAT = pytest.mark.parametrize("phase", EACH_STEP_BY_ITSELF[1:])


@pytest.fixture(params=phase_names())
def phase(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def say(text: str) -> Callable[[list[int]], int]:
    """Return a rule: the bytes of `text` follow a prompt that ends in `:`, then EOS for ever."""

    def rule(token_ids: list[int]) -> int:
        spoken = len(token_ids) - 1 - token_ids.index(ord(":"))
        data = text.encode()
        return data[spoken] if spoken < len(data) else EOS

    return rule


def fails_for(marker: str, error: Exception) -> Callable[[list[list[int]]], None]:
    """Return a hook that raises in passes with a sequence that begins with `marker`."""

    def before_pass(sequences: list[list[int]]) -> None:
        if any(token_ids[0] == ord(marker) for token_ids in sequences):
            raise error

    return before_pass


def picky(guilty: Request, error: Exception) -> Callable[..., Sampled]:
    """Return a sampler that raises for batches that contain one request."""

    def picking(logits: torch.Tensor, rows: Sequence[Request], masks: TokenMasks | None) -> Sampled:
        if guilty in rows:
            raise error
        return sample(logits, rows, masks)

    return picking


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


def test_an_empty_plan_is_legal(phase: str) -> None:
    engine = build(phase)
    assert engine.step() == []
    assert not engine.has_work
    assert engine.next_wake() is None


def test_the_models_own_tokens_come_out(phase: str) -> None:
    engine = build(phase)
    requests = [add(engine, text, greedy(10)) for text in ("a", "hello", "other words", "b")]
    outputs = run(engine)
    for request in requests:
        assert tokens_of(outputs, request) == continuation(request.prompt_token_ids, 10)
        end = end_of(outputs, request)
        assert (end.finish_reason, end.error) == ("length", None)
        assert (end.prompt_tokens, end.completion_tokens) == (request.num_prompt_tokens, 10)
    counts = [o.completion_tokens for o in outputs if o.request_id == requests[0].request_id]
    assert counts == list(range(1, 11))
    run(engine)
    engine.step()
    assert_all_free(engine)


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


def test_unseeded_requests_draw_apart(phase: str, llama: CausalLM) -> None:
    engine = build(phase, llama)
    requests = [add(engine, [1, 2, 3], SamplingParams(max_new_tokens=12)) for _ in range(4)]
    outputs = run(engine)
    assert len({tuple(tokens_of(outputs, request)) for request in requests}) == 4


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


# ---------------------------------------------------------------------- a pass that raises


@pytest.mark.parametrize("error", [RuntimeError("boom"), torch.OutOfMemoryError("out of memory")], ids=repr)
def test_a_pass_that_raises_fails_its_requests_once_each_and_the_engine_goes_on(
    phase: str, error: Exception
) -> None:
    engine = build(phase, RememberingModel(before_pass=fails_for("!", error)))
    guilty = add(engine, "!a", greedy(4))
    end = end_of(run(engine), guilty)
    assert (end.error, end.finish_reason, end.token_id) == (error, None, None)
    assert engine.dead is None
    after = add(engine, "fine", greedy(4))
    assert_answered(run(engine), [after])
    engine.step()
    assert_all_free(engine)
    assert engine.telemetry.counters.requests_failed == 1


@pytest.mark.parametrize("step", ["prefill", "decode"])
@pytest.mark.parametrize("phase", phase_names()[1:])
def test_only_the_guilty_fail_in_a_flat_pass(phase: str, step: str) -> None:
    error = RuntimeError("boom")

    def before_pass(sequences: list[list[int]]) -> None:
        if any(ids[0] == ord("!") and (step == "prefill" or len(ids) > 5) for ids in sequences):
            raise error

    engine = build(phase, RememberingModel(before_pass=before_pass))
    requests = [add(engine, text, greedy(6)) for text in ("one", "!two", "three")]
    outputs = run(engine)
    assert end_of(outputs, requests[1]).error is error
    assert_answered(outputs, (requests[0], requests[2]))
    if phase in EACH_STEP_BY_ITSELF:  # three sequences, the half of two, and the guilty one alone
        assert engine.telemetry.counters.failed_passes == 3
    engine.step()
    assert_all_free(engine)


@FLAT
def test_a_failed_pass_is_bisected(phase: str) -> None:
    """One guilty request of sixteen costs 2 log2 16 more passes, not sixteen."""
    passes: list[int] = []
    fails = fails_for("!", RuntimeError("boom"))

    def before_pass(sequences: list[list[int]]) -> None:
        passes.append(len(sequences))
        fails(sequences)

    engine = build(phase, RememberingModel(before_pass=before_pass), max_batch_size=16)
    requests = [add(engine, "!" if i == 5 else f"{i:02}", greedy(4)) for i in range(16)]
    outputs = engine.step()
    assert passes == [16, 8, 4, 4, 2, 1, 1, 2, 8]
    outputs += run(engine)
    assert str(end_of(outputs, requests.pop(5)).error) == "boom"
    assert_answered(outputs, requests)
    assert_all_free(engine)


def test_a_retry_gives_the_neighbours_the_tokens_they_would_have_had(llama: CausalLM) -> None:
    """The retry uses the same random numbers, so sampled tokens are equal, too. The model fails after computing."""
    params = SamplingParams(max_new_tokens=10, seed=8)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [9]]
    expected = [solo(llama, prompt, params) for prompt in prompts]

    class Stumbles:
        """Computes, but raises at the end of every third pass with several sequences."""

        def __init__(self) -> None:
            self.passes = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(llama, name)

        def __call__(self, batch: Any, view: Any) -> torch.Tensor:
            logits = llama(batch, view)
            if len(view.layout.query_lengths) > 1:
                self.passes += 1
                if self.passes % 3 == 0:
                    raise RuntimeError("stumbled")
            return logits

    engine = build("continuous", Stumbles())
    requests = [add(engine, prompt, params) for prompt in prompts]
    outputs = run(engine)
    assert [tokens_of(outputs, request) for request in requests] == expected
    assert engine.telemetry.counters.failed_passes >= 3


def test_outputs_of_earlier_passes_are_kept() -> None:
    """Phase 5 decodes first. If the prefill after it fails, the tokens of decode are still delivered."""
    engine = build("continuous", RememberingModel(before_pass=fails_for("!", RuntimeError("boom"))))
    running = add(engine, "run", greedy(4))
    engine.step()
    guilty = add(engine, "!", greedy(4))
    outputs = engine.step()
    assert tokens_of(outputs, running) == continuation(b"run", 4)[1:2]
    assert end_of(outputs, guilty).error is not None


# ---------------------------------------------------------------------- a device that fails


def accelerator_error() -> torch.AcceleratorError:
    return torch.AcceleratorError("an illegal memory access was encountered")


def assert_everyone_was_told(
    engine: Engine, outputs: Sequence[StepOutput], requests: Sequence[Request]
) -> None:
    assert engine.dead is not None
    for request in requests:
        assert isinstance(end_of(outputs, request).error, EngineDeadError)
    assert len(outputs) == len(requests)
    with pytest.raises(EngineDeadError):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.add_request(Request("late", [1], SamplingParams()))
    assert engine.next_wake() is None


@STEP_BY_STEP
def test_a_device_error_is_fatal(phase: str) -> None:
    model = RememberingModel()
    engine = build(phase, model, max_batch_size=2)
    requests = [add(engine, text, greedy(9)) for text in ("one", "two", "waits")]
    engine.step()
    model.before_pass = fails_for("t", accelerator_error())
    outputs = engine.step()
    assert_everyone_was_told(engine, outputs, requests)
    assert isinstance(engine.dead and engine.dead.__cause__, torch.AcceleratorError)


@STEP_BY_STEP
def test_a_device_error_that_shows_when_the_tokens_are_read_is_fatal_too(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(phase)
    requests = [add(engine, text, greedy(9)) for text in ("one", "two")]
    engine.step()

    def read_logprobs(*_: Any) -> None:
        raise accelerator_error()

    monkeypatch.setattr(common.engine.runner, "read_logprobs", read_logprobs)
    assert_everyone_was_told(engine, engine.step(), requests)


@STEP_BY_STEP
def test_a_cancelled_request_is_told_once_when_the_device_fails(phase: str) -> None:
    model = RememberingModel()
    engine = build(phase, model)
    stays, leaves = add(engine, "one", greedy(9)), add(engine, "two", greedy(9))
    engine.step()
    engine.cancel(leaves.request_id)
    model.before_pass = fails_for("o", accelerator_error())
    outputs = engine.step()
    assert isinstance(end_of(outputs, stays).error, EngineDeadError)
    assert end_of(outputs, leaves).finish_reason == "cancelled"
    assert len(outputs) == 2


# ---------------------------------------------------------------------- an exception for one request


@STEP_BY_STEP
@pytest.mark.parametrize("place", ["detokenizer", "sampler"])
def test_an_exception_for_one_request_fails_that_one(
    phase: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(phase)
    requests = [add(engine, text, greedy(5)) for text in ("one", "two", "three")]
    error = RuntimeError("no such token")

    def broken(token_id: int) -> str:
        raise error

    if place == "detokenizer":
        monkeypatch.setattr(requests[1].detokenizer, "add", broken)
    else:
        monkeypatch.setattr(common.engine.runner, "sample", picky(requests[1], error))
    outputs = run(engine)
    assert end_of(outputs, requests[1]).error is error
    assert_answered(outputs, (requests[0], requests[2]))
    engine.step()
    assert_all_free(engine)


class Witness:
    """Stands for the tensors that the frames of a failed pass refer to."""


class Witnesses:
    """Raises errors whose frames refer to a `Witness`, and records how many earlier witnesses are still alive."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[Witness]] = []
        self.held_at_a_retry: set[int] = set()

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.references)

    def fail(self, *_: Any) -> None:
        self.held_at_a_retry.add(self.alive())
        tensors = Witness()
        self.references.append(weakref.ref(tensors))
        try:
            raise KeyError("on the way")
        except KeyError:
            raise torch.OutOfMemoryError("no room") from None


@pytest.fixture
def no_log_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off logging: pytest keeps log records, whose tracebacks would keep the frames alive."""
    monkeypatch.setattr(common.engine.runner.logger, "disabled", True)


@STEP_BY_STEP
@pytest.mark.usefixtures("no_log_records")
@pytest.mark.parametrize("place", ["model", "sample", "commit_token"])
def test_what_a_failed_pass_held_is_free_before_it_is_tried_again(
    phase: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a pass that ran out of memory would run out of it again."""
    witnesses, model = Witnesses(), RememberingModel()
    engine = build(phase, model)
    with monkeypatch.context() as patch:
        if place == "model":
            patch.setattr(model, "before_pass", witnesses.fail)
        else:
            patch.setattr(common.engine.runner, place, witnesses.fail)
        requests = [add(engine, text, greedy(5)) for text in ("one", "two", "three")]
        outputs = run(engine)
    assert all(isinstance(end_of(outputs, each).error, torch.OutOfMemoryError) for each in requests)
    assert witnesses.held_at_a_retry == {0}
    if place == "model":
        assert witnesses.alive() == 0
    request = add(engine, "next", greedy(5))
    assert_answered(run(engine), [request])


# ---------------------------------------------------------------------- NaN


def test_nan_logits_fail_one_request(phase: str) -> None:
    def rule(token_ids: list[int]) -> Any:
        bad = token_ids[0] == ord("!") and len(token_ids) == 5
        return torch.full((VOCAB,), math.nan) if bad else continuation(token_ids, 1)[0]

    engine = build(phase, RememberingModel(rule=rule))
    requests = [add(engine, text, greedy(6)) for text in ("one", "!wo", "three")]
    outputs = run(engine)
    end = end_of(outputs, requests[1])
    assert isinstance(end.error, NaNLogitsError)
    assert (end.completion_tokens, len(tokens_of(outputs, requests[1]))) == (2, 2)
    assert_answered(outputs, (requests[0], requests[2]))


def test_nan_in_the_cache_stays_with_its_owner(phase: str) -> None:
    """The embedding of token 299 is NaN, and so are its keys and values. Neither neighbours in the pass nor later
    users of the memory may read them."""
    model = tiny_model()
    model.embed_tokens.weight.data[299] = math.nan
    params = SamplingParams(max_new_tokens=8, seed=2)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [13]]
    expected = [solo(model, prompt, params) for prompt in prompts]
    engine = build(phase, model, max_batch_size=2)
    poisoned = [add(engine, [299] * 20, params), add(engine, [1, 299, 3], params)]
    requests = [add(engine, prompt, params) for prompt in prompts]
    poisoned.insert(1, add(engine, [5, 5, 5, 299], params))
    requests += [add(engine, prompt, params) for prompt in prompts]
    outputs = run(engine)
    assert all(isinstance(end_of(outputs, request).error, NaNLogitsError) for request in poisoned)
    assert [tokens_of(outputs, request) for request in requests] == expected * 2


@STEP_BY_STEP
def test_nan_of_a_request_that_failed_otherwise_reaches_nobody(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    model.embed_tokens.weight.data[299] = math.nan
    engine = build(phase, model, max_batch_size=2)
    poisoned = add(engine, [299] * 30, greedy(4))

    monkeypatch.setattr(common.engine.runner, "sample", picky(poisoned, RuntimeError("boom")))
    run(engine)
    # One of these requests gets the memory with NaN, and is computed together with a longer one.
    requests = [add(engine, [1, 2, 3], greedy(8)), add(engine, list(range(1, 40)), greedy(8))]
    outputs = run(engine)
    for request in requests:
        assert tokens_of(outputs, request) == solo(model, request.prompt_token_ids, request.params)


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


def test_cancelling_what_is_done_or_unknown_does_nothing(phase: str) -> None:
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
        engine.add_request(engine.create_request("b", greedy(1), "same"))
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


@STEP_BY_STEP
def test_a_request_that_ended_in_a_step_that_raised_is_still_answered(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker then calls `abort_all`. The request keeps its finish reason, and only its last token is lost."""
    engine = build(phase)
    done, running = add(engine, "one", greedy(2)), add(engine, "two", greedy(9))
    engine.step()
    commit = engine.runner.commit

    def commit_and_raise(launched: Any) -> list[StepOutput]:
        commit(launched)
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(engine.runner, "commit", commit_and_raise)
    engine.cancel(add(engine, "gone", greedy(2), "gone").request_id)
    with pytest.raises(KeyError):
        engine.step()
    outputs = engine.abort_all(RuntimeError("over"))
    assert end_of(outputs, done).finish_reason == "length"
    assert end_of(outputs, running).error is not None
    assert sorted(o.request_id for o in outputs) == sorted(["gone", done.request_id, running.request_id])


# ---------------------------------------------------------------------- audit


def test_the_audit_after_a_failed_pass_reclaims_what_nobody_holds(phase: str) -> None:
    engine = build(phase, RememberingModel(before_pass=fails_for("!", RuntimeError("boom"))))
    orphan = Request("orphan", [1, 2, 3], greedy(4))
    assert engine.runner.pool.reserve(orphan, 3)
    guilty = add(engine, "!", greedy(4))
    assert end_of(run(engine), guilty).error is not None
    assert engine.telemetry.counters.reclaimed_slots == 1
    engine.step()
    assert engine.runner.pool.used_tokens == 0
    assert engine.runner.pool.reserved_tokens == 0


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


def test_counts_of_a_flat_batch_worked_by_hand() -> None:
    """The same requests in phase 5 with two seats: no padding and no idle rows."""
    engine = build("continuous", max_batch_size=2, max_seq_len=16)
    for prompt, new in ((b"ab", 1), (b"abcde", 3), (b"abc", 2)):
        add(engine, prompt, greedy(new))
    run(engine)
    assert counts(engine) == [
        (1, 7, 0, 0, 0, 7),
        (2, 3, 1, 0, 0, 6 + 3),
        (1, 0, 2, 0, 0, 7 + 4),
        (0, 0, 0, 0, 0, 0),
    ]
    assert [r.kv_reserved_tokens for r in engine.telemetry.records] == [32, 32, 32, 0]
    assert [(r.waiting, r.active) for r in engine.telemetry.records] == [(1, 2), (0, 2), (0, 2), (0, 0)]


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


# ---------------------------------------------------------------------- checking requests


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param"),
    [
        ("", greedy(4), InvalidPromptError, "prompt"),
        ([], greedy(4), InvalidPromptError, "prompt"),
        ([1, VOCAB], greedy(4), InvalidPromptError, "prompt"),
        ([-1], greedy(4), InvalidPromptError, "prompt"),
        ([1] * 64, greedy(1), InvalidRequestError, "prompt"),
        ("x" * 64, greedy(1), InvalidRequestError, "prompt"),
        ("x" * 10_000, greedy(1), InvalidRequestError, "prompt"),
        ([1] * 60, greedy(5), InvalidRequestError, "max_tokens"),
        ([1], greedy(4, stop_token_ids=(VOCAB,)), InvalidRequestError, "stop_token_ids"),
        ([1], greedy(4, stop_token_ids=(-1,)), InvalidRequestError, "stop_token_ids"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    phase: str, prompt: Any, params: SamplingParams, error: type[InvalidRequestError], param: str
) -> None:
    with pytest.raises(error) as caught:
        build(phase).create_request(prompt, params)
    assert type(caught.value) is error
    assert caught.value.param == param


def test_a_text_of_too_many_tokens_is_refused_before_its_ids_are_looked_at(phase: str) -> None:
    """Checking the ids of a text of two megabytes would take long."""
    engine = build(phase, RememberingModel(config=model_config(vocab_size=ord("y"))))
    with pytest.raises(InvalidPromptError, match=f"token id {ord('y')} is not in the vocabulary"):
        engine.create_request("xy", greedy(1))
    with pytest.raises(InvalidRequestError, match="the prompt has 64 tokens"):
        engine.create_request("y" * 64, greedy(1))
    assert engine.create_request("x" * 63, greedy(1)).num_prompt_tokens == 63


def test_a_request_may_fill_the_whole_sequence(phase: str) -> None:
    engine = build(phase)
    request = add(engine, [1] * 60, greedy(4))
    other = add(engine, [2], greedy(63))
    outputs = run(engine)
    assert len(tokens_of(outputs, request)) == 4
    assert tokens_of(outputs, other) == continuation([2], 63)


def test_a_request_takes_its_endings_from_the_model_and_its_id_from_the_engine(phase: str) -> None:
    engine = build(phase)
    first, second = (engine.create_request("a", greedy(1)) for _ in range(2))
    assert first.request_id != second.request_id
    assert first.eos_token_ids == {EOS}
    assert first.prompt_token_ids == [ord("a")]


def test_a_full_queue_refuses_and_changes_nothing(phase: str) -> None:
    engine = build(phase, max_waiting_requests=1, max_batch_size=1)
    accepted = [engine.add_request(engine.create_request("a", greedy(1))) for _ in range(4)]
    assert accepted == (
        [True, False, False, False] if phase == "phase4_static" else [True, True, False, False]
    )
    assert engine.telemetry.counters.requests_added == sum(accepted)
    assert len(run(engine)) == sum(accepted)


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


def test_watchers_see_the_step_that_ended_an_engine(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(phase)
    told: list[StepOutput] = []
    engine.watchers.append(lambda _record, _plan, outputs: told.extend(outputs))
    add(engine, "abc", greedy(3))

    def die(*_: object) -> list[StepOutput]:
        raise EngineDeadError("gone")

    monkeypatch.setattr(engine.runner, "execute", die)
    assert engine.step() == told
    assert [output.finished for output in told] == [True]
