"""Requests with a grammar inside an engine: their ends, other fields beside the grammar, and their failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from common.constrained.grammar import Grammar, Matcher
from common.engine.engine import Engine
from common.errors import GrammarFailedError
from common.startup.phases import find_phase, phase_names
from tests.support.engines import (
    EOS,
    VOCAB,
    RememberingModel,
    add,
    assert_all_free,
    build_constrained,
    end_of,
    greedy,
    run,
    text_of,
)
from tests.support.grammars import slowed


@pytest.fixture(params=phase_names())
def phase(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def likes(*token_ids: int) -> Callable[[list[int]], Tensor]:
    """Return a rule for a `RememberingModel`: these tokens are the likeliest after any text, the first one most."""

    def rule(_: list[int]) -> Tensor:
        logits = torch.zeros(VOCAB)
        for rank, token_id in enumerate(token_ids):
            logits[token_id] = 50.0 - rank
        return logits

    return rule


def answer(engine: Engine, grammar: Grammar, **values: Any) -> tuple[str, str | None, int]:
    """Serve a greedy request. Returns the answer's text, its finish reason and its number of tokens."""
    request = add(engine, "ask:", greedy(values.pop("max_new_tokens", 12), grammar=grammar, **values))
    outputs = run(engine)
    end = end_of(outputs, request)
    assert end.error is None
    return text_of(outputs, request), end.finish_reason, end.completion_tokens


A, B, X = ord("a"), ord("b"), ord("x")

# ---------------------------------------------------------------------- ends


def test_an_answer_that_can_only_be_complete_ends(phase: str) -> None:
    """The answer ends with its last character. No further step is needed."""
    engine = build_constrained(phase, RememberingModel(rule=likes(X, A)))
    assert answer(engine, Grammar.regex("a{3}b")) == ("aaab", "stop", 4)
    assert answer(engine, Grammar.regex("a{3}b"), ignore_eos=True) == ("aaab", "stop", 4)
    assert answer(engine, Grammar.regex("a{3}b"), max_new_tokens=4) == ("aaab", "stop", 4)
    assert answer(engine, Grammar.regex("a{3}b"), max_new_tokens=3) == ("aaa", "length", 3)
    assert_all_free(engine)


def test_an_answer_that_may_go_on_ends_by_eos(phase: str) -> None:
    engine = build_constrained(phase, RememberingModel(rule=likes(X, EOS, A)))
    assert answer(engine, Grammar.regex("a+")) == ("a", "eos", 2)
    assert answer(engine, Grammar.regex("a*")) == ("", "eos", 1)
    assert answer(engine, Grammar.regex("")) == ("", "eos", 1)


@pytest.mark.parametrize("values", [{"ignore_eos": True}, {"min_tokens": 12}], ids=str)
def test_an_ignored_eos_is_not_sampled_while_there_is_anything_else(phase: str, values: Any) -> None:
    engine = build_constrained(phase, RememberingModel(rule=likes(EOS, A)))
    assert answer(engine, Grammar.regex("a*"), **values) == ("a" * 12, "length", 12)
    assert answer(engine, Grammar.regex("a{0,5}"), **values) == ("aaaaa", "stop", 5)
    assert answer(engine, Grammar.regex(""), **values) == ("", "eos", 1)


def test_min_tokens_hold_eos_and_stop_tokens_back(phase: str) -> None:
    engine = build_constrained(phase, RememberingModel(rule=likes(EOS, B, A)))
    assert answer(engine, Grammar.regex("[ab]*"), min_tokens=3) == ("bbb", "eos", 4)
    ended_by_b = {"min_tokens": 3, "stop_token_ids": (B,)}
    engine = build_constrained(phase, RememberingModel(rule=likes(B, A)))
    assert answer(engine, Grammar.regex("[ab]*"), **ended_by_b) == ("aaa", "stop", 4)
    assert answer(engine, Grammar.regex("b+"), **ended_by_b) == ("", "stop", 1), "nothing else may come"


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("error", [GrammarFailedError("too much"), RuntimeError("broken")], ids=str)
@pytest.mark.parametrize("method", ["_fill", "advance"])
def test_a_matcher_that_fails_fails_its_request_alone_and_costs_no_pass(
    phase: str, method: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = RememberingModel(rule=likes(A, B))
    engine = build_constrained(phase, model)
    grammar = Grammar.regex("(ab)+")
    undisturbed = [add(engine, "ask", greedy(6, grammar=grammar)) for _ in range(3)]
    assert [text_of(run(engine), undisturbed[0])] == ["ababab"]
    passes = len(model.calls)
    requests = [add(engine, "ask", greedy(6, grammar=grammar)) for _ in range(3)]
    original, guilty = getattr(Matcher, method), requests[1]

    def failing(matcher: Matcher, *args: Any) -> None:
        if matcher is guilty.matcher and guilty.num_generated_tokens == 2:
            raise error
        original(matcher, *args)

    monkeypatch.setattr(Matcher, method, failing)
    outputs = run(engine)
    end = end_of(outputs, guilty)
    assert str(error) in str(end.error)
    assert (end.completion_tokens, text_of(outputs, guilty)) == (2, "ab")
    assert [text_of(outputs, request) for request in (requests[0], requests[2])] == ["ababab"] * 2
    assert len(model.calls) == 2 * passes
    assert engine.telemetry.counters.failed_passes == 0
    assert answer(engine, Grammar.regex("b{3}")) == ("bbb", "stop", 3)
    assert_all_free(engine)


def test_slow_masks_fail_their_request_alone(phase: str) -> None:
    """Masks of 25 ms exceed the budget within six tokens. The neighbours get all their tokens."""
    engine = build_constrained(phase, RememberingModel(rule=likes(A, B)))
    slow = add(engine, "ask", greedy(30, grammar=Grammar.regex("(ab)+")))
    assert slow.matcher is not None
    slowed(slow.matcher, 0.025)
    constrained = add(engine, "ask", greedy(30, grammar=Grammar.regex("(ba)+")))
    plain = add(engine, "plain", greedy(30))
    outputs = run(engine)
    end = end_of(outputs, slow)
    assert isinstance(end.error, GrammarFailedError)
    assert "the budget is 2.01 ms a token" in str(end.error)
    assert end.completion_tokens <= 6
    assert text_of(outputs, constrained) == "ba" * 15
    assert text_of(outputs, plain) == "a" * 30
    assert engine.telemetry.counters.failed_passes == 0
    assert answer(engine, Grammar.regex("b{3}")) == ("bbb", "stop", 3)
    assert_all_free(engine)


@pytest.mark.parametrize(
    "phase", [name for name in phase_names() if "pipeline_depth" not in find_phase(name).Config.model_fields]
)
def test_a_mask_is_computed_while_the_next_pass_is(phase: str) -> None:
    """The mask of every token but the first is begun before the pass that computes the token's logits."""
    model = RememberingModel(rule=likes(A, B))
    engine = build_constrained(phase, model)
    request = add(engine, "ask", greedy(8, grammar=Grammar.regex("(ab)+")))
    begun: list[int] = []

    def look(sequences: list[list[int]]) -> None:
        assert request.matcher is not None
        if request.num_generated_tokens and request.matcher._filling is not None:
            begun.append(request.num_generated_tokens)

    model.before_pass = look
    assert text_of(run(engine), request) == "abababab"
    assert begun == list(range(1, 8))
