"""Steps with guesses beside steps that run ahead, memory, and the cost of guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from common.engine.scheduling import RowCost
from common.request import Request
from kernels import native
from phase10_speculative import Config, Runner, build_engine
from tests.support.engines import (
    RememberingModel,
    add,
    assert_all_free,
    assert_answered,
    build,
    chained,
    greedy,
    run,
    text_of,
    tokens_of,
)
from tests.support.streams import by_rule, guessing

RIGHT = by_rule(chained, wrong_at=lambda place: False)
WRONG = by_rule(chained, wrong_at=lambda place: True)


def test_a_step_with_guesses_is_read_before_the_next_and_others_run_ahead() -> None:
    def now_and_then(request: Request, token_ids: Sequence[int], limit: int) -> list[int]:
        return RIGHT(request, token_ids, limit) if len(token_ids) % 16 < 4 else []

    engine = guessing(now_and_then, draft_length=2)
    request = add(engine, [7, 8, 9], greedy(50))
    runner = engine.runner
    assert isinstance(runner, Runner)
    verified = ahead = 0
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        if runner.state.most == 1:
            verified += 1
            assert len(runner.state.steps) == 1
        ahead += len(runner.state.steps) == 2
    assert_answered(outputs, [request])
    assert verified >= 3
    assert ahead >= 10


@pytest.mark.parametrize(("guess", "most"), [(RIGHT, 12), (WRONG, 52)], ids=["right", "wrong"])
def test_right_guesses_save_passes(guess: object, most: int) -> None:
    engine = guessing(guess, draft_length=7)  # type: ignore[arg-type]
    request = add(engine, [7, 8, 9], greedy(50))
    assert_answered(run(engine), [request])
    assert engine.telemetry.counters.passes <= most
    end = request.drafts.accepted, request.drafts.guessed
    assert (end[0] > 40) if guess is RIGHT else end[0] == 0 < end[1]


def test_a_stop_string_within_accepted_guesses_ends_the_answer() -> None:
    def letters(token_ids: list[int]) -> int:
        return ord("a") + len(token_ids) % 26

    params = greedy(30, stop=("kl",), ignore_eos=True)
    answers = []
    for engine in (
        build("phase9_pipelined", RememberingModel(rule=letters)),
        guessing(by_rule(letters, wrong_at=lambda _: False), RememberingModel(rule=letters), draft_length=7),
    ):
        request = add(engine, "prompt", params)
        outputs = run(engine)
        answers.append((tokens_of(outputs, request), text_of(outputs, request), request.finish_reason))
        assert_all_free(engine)
    assert answers[0] == answers[1]
    assert answers[0][1:] == ("ghij", "stop")


def test_guesses_that_do_not_pay_are_not_computed_and_begin_again_where_they_would_have_been_right() -> None:
    """The text repeats itself in its second half."""

    def rule(token_ids: list[int]) -> int:
        place = len(token_ids)
        return (place * place * 7) % 251 if place < 60 else 10 + place % 9

    engine = build("phase10_speculative", RememberingModel(rule=rule), max_seq_len=256)
    request = add(engine, [1, 2, 3], greedy(200))
    outputs = []
    while request.num_generated_tokens < 55:
        outputs += engine.step()
    first = request.drafts.guessed
    outputs += run(engine)
    text = [1, 2, 3]
    while len(text) < 203:
        text.append(rule(text))
    assert request.token_ids == text
    assert first < 20
    assert request.drafts.accepted > 100


@pytest.mark.skipif(not native.is_loaded(), reason="no native kernels here")
@pytest.mark.parametrize(
    ("options", "asks", "measured"),
    [
        ({}, True, True),
        ({"num_blocks": 1, "max_seq_len": 2}, True, False),
        ({"max_seq_len": 32}, True, False),
        ({"draft_rows": 9}, False, False),
        ({"draft_length": 0}, False, False),
        ({"captured_steps": False}, True, False),
    ],
    ids=str,
)
def test_the_cost_of_a_row_is_measured_if_guesses_must_pay(
    options: dict[str, Any], asks: bool, measured: bool
) -> None:
    settings: dict[str, Any] = {
        "model": "zoo:llama-tiny",
        "dtype": "float32",
        "max_seq_len": 64,
        "block_size": 1,
        "num_blocks": 100,
    }
    engine = build_engine(Config(**settings | options))
    assert (engine.scheduler.row_cost is not None) == asks
    assert (engine.scheduler.row_cost not in (None, RowCost())) == measured
    assert_all_free(engine)
    assert engine.telemetry.accepted_at == []


def test_wrong_guesses_take_no_memory_that_others_need_soon() -> None:
    """Sixteen blocks are just enough for these requests without guesses: nobody is preempted."""
    preemptions = []
    sizes = {"block_size": 4, "num_blocks": 16, "enable_prefix_caching": False}
    for engine in (build("phase9_pipelined", **sizes), guessing(WRONG, draft_length=7, **sizes)):
        lengths = (12, 19), (3, 15), (6, 14), (4, 9)
        requests = [
            add(engine, [number] * prompt, greedy(new)) for number, (prompt, new) in enumerate(lengths, 1)
        ]
        assert_answered(run(engine), requests)
        preemptions.append(engine.telemetry.counters.preemptions)
    assert preemptions == [0, 0]
