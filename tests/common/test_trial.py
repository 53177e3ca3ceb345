"""The trial of a grammar, in this process: verdicts, random answers and their budgets, and its lines."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import llguidance
import pytest

from common.constrained import trial
from common.constrained.trial import MaskBudget, compile_grammar, walk

TOKENIZER = llguidance.LLTokenizer("byte")


def verdict(kind: str, text: str) -> str | None:
    verdicts: list[str | None] = []
    trial._try(TOKENIZER, kind, text, verdicts)
    return verdicts[0]


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "[a-z ]{40}", ""),
        ("regex", "", ""),
        ("choice", '["a(b", "c|d"]', ""),
        ("json_schema", '{"type": "array", "items": {"format": "colour"}}', ""),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"pattern": "(", "type": "string"}', "pattern: unclosed group"),
        ("json_schema", '{"$ref": "#"}', "no text matches it"),
    ],
)
def test_a_verdict_names_the_reason(kind: str, text: str, reason: str) -> None:
    found = verdict(kind, text)
    assert (reason in found) if reason else found is None


def test_an_answer_that_ends_early_ends_its_walk_and_a_longer_one_is_bounded() -> None:
    for pattern, tokens in (("abc", 3), ("a{500}", trial.WALK_TOKENS)):
        matcher, budget = compile_grammar(TOKENIZER, "regex", pattern), MaskBudget(TOKENIZER.vocab_size)
        walk(matcher, TOKENIZER, 0, budget)
        assert budget._tokens == tokens


def test_masks_over_their_budget_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is 30 ms after the one before: a mask and an advance take 60 ms."""
    readings = itertools.count(0.0, 0.03)
    monkeypatch.setattr(trial, "thread_time", lambda: next(readings))
    found = verdict("regex", "[a-z]{9}")
    assert found is not None
    assert found.startswith(
        "a trial answer fails after 2 tokens: its masks took 60 ms of processor time a token"
    )


def test_a_line_for_each_grammar_until_one_has_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[Any] = [
        {"tokenizer": "byte"},
        ["regex", "ab?"],
        ["regex", "("],
        ["regex", "crash"],
        ["regex", "c"],
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{json.dumps(each)}\n" for each in lines)))
    monkeypatch.setattr(trial.os, "nice", lambda _: 0)
    monkeypatch.setattr(trial.threading, "stack_size", lambda _: 0)
    timers: list[float] = []
    monkeypatch.setattr(trial.signal, "setitimer", lambda _, seconds: timers.append(seconds))
    original = trial._try

    def crashing(tokenizer: llguidance.LLTokenizer, kind: str, text: str, verdicts: list[str | None]) -> None:
        if text != "crash":
            original(tokenizer, kind, text, verdicts)

    monkeypatch.setattr(trial, "_try", crashing)
    trial.main()
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first, "unclosed" in second) == (None, True)
    assert timers == [trial.TIME_LIMIT_S, 0.0] * 3
