"""Passes that raise, devices that fail and NaN, in every phase: only the requests that cause a failure fail.

Phases 7 to 9 have failures of their own: in the middle of a prompt, beside shared blocks, with steps in flight.
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
from common.errors import EngineDeadError, NaNLogitsError
from common.models.layers import CausalLM
from common.request import Request, SamplingParams, StepOutput
from common.sampling.draw import Sampled, sample
from common.sampling.inputs import TokenMasks
from common.startup.phases import find_phase, phase_names
from tests.support.engines import (
    ALLERGEN,
    VOCAB,
    RememberingModel,
    add,
    assert_all_free,
    assert_answered,
    build,
    continuation,
    end_of,
    greedy,
    nan_model,
    run,
    solo,
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


def test_after_a_retry_the_other_requests_keep_their_tokens(llama: CausalLM) -> None:
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
def test_tensors_of_a_failed_pass_are_freed_before_its_retry(
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
    """The embedding of `ALLERGEN` is NaN, and so are its keys and values. Neither neighbours in the pass nor later
    users of the memory may read them."""
    model = nan_model()
    params = SamplingParams(max_new_tokens=8, seed=2)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [13]]
    expected = [solo(model, prompt, params) for prompt in prompts]
    engine = build(phase, model, max_batch_size=2)
    poisoned = [add(engine, [ALLERGEN] * 20, params), add(engine, [1, ALLERGEN, 3], params)]
    requests = [add(engine, prompt, params) for prompt in prompts]
    poisoned.insert(1, add(engine, [5, 5, 5, ALLERGEN], params))
    requests += [add(engine, prompt, params) for prompt in prompts]
    outputs = run(engine)
    assert all(isinstance(end_of(outputs, request).error, NaNLogitsError) for request in poisoned)
    assert [tokens_of(outputs, request) for request in requests] == expected * 2
    # A pass that began meanwhile computes any token in place of one that is missing.
    assert engine.telemetry.counters.failed_passes == 0


# ---------------------------------------------------------------------- audit


def test_the_audit_after_a_failed_pass_reclaims_memory_without_a_holder(phase: str) -> None:
    engine = build(phase, RememberingModel(before_pass=fails_for("!", RuntimeError("boom"))))
    orphan = Request("orphan", [1, 2, 3], greedy(4))
    assert engine.runner.pool.reserve(orphan, 3)
    guilty = add(engine, "!", greedy(4))
    assert end_of(run(engine), guilty).error is not None
    assert engine.telemetry.counters.reclaimed_slots == 1
    engine.step()
    assert engine.runner.pool.used_tokens == 0
    assert engine.runner.pool.reserved_tokens == 0
