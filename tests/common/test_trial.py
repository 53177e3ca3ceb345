"""The trial of a grammar, in this process: verdicts, random answers and their budgets, its lines, and GBNF."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


# ---------------------------------------------------------------------- GBNF

#: An expression of GBNF: a text, characters in brackets, or a list of expressions after `|`, `,` or a repetition.
Expression = Any

INSIDE = {"[ab]": "ab", "[^a]": "bc", "[b-c]": "bc", ".": "abc"}


def _nested(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    how = st.sampled_from(["|", ",", ","])
    several = st.builds(lambda kind, parts: (kind, *parts), how, st.lists(inner, min_size=2, max_size=3))
    return several | st.builds(lambda kind, part: (kind, part), st.sampled_from("*+?"), inner)


def expressions(*names: str) -> st.SearchStrategy[Expression]:
    """Return a strategy for expressions that may refer to rules."""
    leaves = st.sampled_from(["a", "b", "ab", "ba", "abc", *INSIDE, *names, *names])
    return st.recursive(leaves, _nested, max_leaves=5)


def spelled(expression: Expression) -> str:
    match expression:
        case str():
            return expression if expression in INSIDE or expression[0] == "r" else f'"{expression}"'
        case ("|" | ",") as kind, *parts:
            return "(" + (" | " if kind == "|" else " ").join(map(spelled, parts)) + ")"
    return f"({spelled(expression[1])}){expression[0]}"


def ends(expression: Expression, rules: dict[str, Expression], text: str, start: int) -> set[int]:
    """Return where the texts of an expression that begin at `start` may end: all ways are tried."""
    match expression:
        case str() if expression in rules:
            return ends(rules[expression], rules, text, start)
        case str() if expression in INSIDE:
            return {start + 1} if start < len(text) and text[start] in INSIDE[expression] else set()
        case str():
            return {start + len(expression)} if text.startswith(expression, start) else set()
        case "|", *parts:
            return {end for part in parts for end in ends(part, rules, text, start)}
        case ",", *parts:
            found = {start}
            for part in parts:
                found = {end for place in found for end in ends(part, rules, text, place)}
            return found
    kind, part = expression
    found = ends(part, rules, text, start)
    new = found if kind != "?" else set()
    while new:
        new = {end for place in new for end in ends(part, rules, text, place)} - found
        found |= new
    return found if kind == "+" else found | {start}


TEXTS = ["".join(each) for length in range(6) for each in itertools.product("abc", repeat=length)]


def accepted(grammar: str, texts: list[str]) -> list[str]:
    """Return those of the texts that a grammar in GBNF has."""
    matcher = compile_grammar(TOKENIZER, "gbnf", grammar)
    found = []
    for text in texts:
        matcher.reset()
        if matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting():
            found.append(text)
    return found


@settings(max_examples=150)
@given(root=expressions("rule-1", "rule2"), first=expressions("rule2"), second=expressions())
@pytest.mark.slow
def test_gbnf_reads_a_text_in_all_ways(root: Expression, first: Expression, second: Expression) -> None:
    """All texts of up to five letters, decided by a recogniser that tries all ways."""
    rules = {"rule-1": first, "rule2": second}
    grammar = f"root ::= {spelled(root)}\nrule-1 ::= {spelled(first)}\nrule2 ::= {spelled(second)}"
    assert accepted(grammar, TEXTS) == [text for text in TEXTS if len(text) in ends(root, rules, text, 0)]


SUM = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws # a name
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= word "s"\nword ::= [a-z]+', ["cats", "ss"], ["cat", "s"]),
        (SUM, ["a+1=2\n", "(a1 *b) -c =3\n\n4=x\n"], ["a+=2\n", "1=2"]),
        ("root ::= start\nstart ::= [a&&~] .", ["&\n", "~a"], ["b ", "a"]),
        (
            'root ::= ("a" | "ab") "b" fooBar foo-bar\nfooBar ::= "é"{2}\nfoo-bar ::= "x"',
            ["abééx", "abbééx"],
            ["abéx"],
        ),
    ],
)
def test_gbnf_of_llama_cpp(grammar: str, good: list[str], bad: list[str]) -> None:
    assert accepted(grammar, good + bad) == good
