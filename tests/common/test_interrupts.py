"""Interrupts (Ctrl-C) and errors anywhere in a step: the call raises, and the next call gets right answers."""

from __future__ import annotations

import _thread
import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

import common.engine.runner
from common.engine.engine import Engine
from common.llm import LLM
from common.request import StepOutput
from tests.support.engines import (
    RememberingModel,
    add,
    assert_all_free,
    build,
    continuation,
    end_of,
    greedy,
    llm_of,
    run,
    tokens_of,
)

#: Steps of phases 5 to 8 differ in their plans only.
PHASES = ("static", "prefix", "pipelined")
PROMPTS = [[1, 2, 3, 4], [1, 2, 3, 4, 5], [6, 7], [8] * 9]
PARAMS = [greedy(5), greedy(3), greedy(7), greedy(4)]
ANSWERS = [continuation(prompt, each.max_new_tokens) for prompt, each in zip(PROMPTS, PARAMS, strict=True)]

#: Functions of every phase that are made to raise, before or after they have done their work.
PLACES = [
    ("scheduler", "retire", "after"),
    ("runner", "release", "before"),
    ("scheduler", "make_room", "after"),
    ("scheduler", "admit", "after"),
    ("scheduler", "plan", "after"),
    ("runner", "settle", "after"),
    ("runner", "execute", "after"),
    ("runner", "commit", "before"),
    ("runner", "commit", "after"),
    ("runner", "register_prefixes", "before"),
    ("common.engine.runner", "read_logprobs", "before"),  # before a step's first token is committed
    ("common.engine.runner", "commit_token", "before"),  # between two tokens of a step
    ("common.engine.runner", "commit_token", "after"),
]
PIPELINED_PLACES = [
    ("runner", "launch_forward", "before"),
    ("runner", "launch_forward", "after"),
    ("runner", "_launch_one", "before"),
    ("runner", "_launch_one", "after"),
    ("runner", "finalize_sampling", "before"),
    ("runner", "finalize_sampling", "after"),
    ("runner", "_sample_one", "after"),
    ("runner", "commit_step", "before"),
    ("runner", "commit_step", "after"),
    ("runner", "_read", "before"),
    ("runner", "_read", "after"),
    ("state", "on_launch", "after"),
    ("state", "on_pending_commit", "before"),
    ("state", "on_pending_commit", "after"),
    ("state", "on_step_completed", "before"),
    ("state", "on_step_completed", "after"),
]
CASES = [(phase, *place) for phase in PHASES for place in PLACES]
CASES += [("pipelined", *place) for place in PIPELINED_PLACES]


def ready(phase: str, model: RememberingModel, monkeypatch: pytest.MonkeyPatch) -> LLM:
    options: dict[str, Any] = {"max_batch_size": 3}
    if phase in ("prefix", "pipelined"):
        options |= {"block_size": 2, "num_blocks": 18, "prefill_chunk_size": 4}
    return llm_of(build(phase, model, **options), monkeypatch)


def raise_at(
    owner: Any, name: str, when: str, call: int, error: BaseException, patch: pytest.MonkeyPatch
) -> None:
    """Make the n-th call (`call`) of a function raise, before or after it has done its work."""
    function: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def raising(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            raise error
        result = function(*args, **kwargs)
        if calls == call and when == "after":
            raise error
        return result

    patch.setattr(owner, name, raising)


def generate(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS, progress=False)]


def assert_as_new(llm: LLM) -> None:
    assert generate(llm) == ANSWERS
    engine = llm.engine
    assert not engine.has_work or engine.step() == []  # releases the memory of requests that ended last
    pool = engine.runner.pool
    assert (pool.used_tokens, pool.reserved_tokens, len(pool.slots)) == (0, 0, 0)
    assert (engine.scheduler.active, engine.scheduler.num_waiting) == ([], 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, LookupError])
@pytest.mark.parametrize(("phase", "owner", "name", "when"), CASES)
def test_an_error_anywhere_in_a_step_leaves_the_engine_as_new(
    phase: str, owner: str, name: str, when: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = ready(phase, RememberingModel(), monkeypatch)
    engine: Any = llm.engine
    owners = {
        "scheduler": engine.scheduler,
        "runner": engine.runner,
        "common.engine.runner": common.engine.runner,
    }
    if phase == "pipelined":
        owners["state"] = engine.runner.state
    for call in (1, 4):
        with pytest.MonkeyPatch.context() as patch:
            raise_at(owners[owner], name, when, call, error("at that place"), patch)
            try:
                answers = llm.generate(PROMPTS, PARAMS, progress=False)
            except error:
                pass
            else:  # an ordinary error may be survived, or fail one request
                assert error is not KeyboardInterrupt
                assert all(
                    a.token_ids == right for a, right in zip(answers, ANSWERS, strict=True) if not a.error
                )
                assert sum(a.error is not None for a in answers) <= 1
        assert_as_new(llm)


@pytest.mark.parametrize("phase", ["prefix", "pipelined"])
def test_a_real_ctrl_c_while_a_pass_computes(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the host of phase 9 waits for tokens."""
    model = RememberingModel()
    llm = ready(phase, model, monkeypatch)
    for before in (0, 3, 6):
        left = before

        def before_pass(_: object) -> None:
            nonlocal left
            if left == 0:
                time.sleep(0.02)
                _thread.interrupt_main()
                time.sleep(0.02)
            left -= 1

        model.before_pass = before_pass
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
        model.before_pass = lambda _: None
        assert_as_new(llm)


# ---------------------------------------------------------------------- an engine that goes on


def step_until_interrupted(engine: Engine, outputs: list[StepOutput]) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        for _ in range(100):
            outputs += engine.step()
        raise AssertionError("no step was interrupted")


def interrupted(phase: str, name: str, when: str) -> tuple[Engine, list[StepOutput], list[Any]]:
    """Interrupt a step of an engine with three requests and two seats. Returns engine, outputs and requests."""
    engine = build(phase, max_batch_size=2)
    requests = [add(engine, [i, 1, 2], greedy(4)) for i in range(3)]
    outputs: list[StepOutput] = []
    with pytest.MonkeyPatch.context() as patch:
        raise_at(engine.runner, name, when, 2, KeyboardInterrupt(), patch)
        step_until_interrupted(engine, outputs)
    return engine, outputs, requests


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("name", "when"), [("commit", "before"), ("commit", "after"), ("execute", "before")])
def test_after_an_interrupt_running_requests_fail_and_waiting_ones_are_served(
    phase: str, name: str, when: str
) -> None:
    """After the interrupt, the engine can be stepped. Every request ends, and none lacks a token in the middle."""
    engine, outputs, requests = interrupted(phase, name, when)
    outputs += run(engine)
    for each in requests[:2]:
        assert "interrupted" in str(end_of(outputs, each).error)
        tokens = tokens_of(outputs, each)
        assert tokens == continuation(each.prompt_token_ids, 4)[: len(tokens)]
    assert tokens_of(outputs, requests[2]) == continuation(requests[2].prompt_token_ids, 4)
    assert_all_free(engine)
