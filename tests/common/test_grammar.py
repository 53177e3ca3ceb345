"""Grammars and their matchers: masks compared with plain string operations, refusals, and compilers that fail."""

from __future__ import annotations

import gc
import json
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from common.constrained.grammar import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarCompiler, Matcher, without
from common.constrained.trial import MaskBudget, OverBudgetError
from common.errors import GrammarFailedError, InvalidGrammarError, ShuttingDownError
from tests.support.engines import EOS, byte_tokenizer
from tests.support.grammars import slowed

PIECES = [b"ab", b"abc", b"bc", "é".encode(), "é".encode()[1:] + b"a", b"\n\n"]
COMPILER = GrammarCompiler(byte_tokenizer(PIECES), [EOS])


def allowed(matcher: Matcher, held_back: Sequence[int] = ()) -> set[int]:
    mask = without(matcher.mask(), held_back)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def bytes_of(token_id: int) -> bytes:
    return bytes([token_id]) if token_id < EOS else PIECES[token_id - EOS - 1]


TOKENS = [token_id for token_id in range(EOS + 1 + len(PIECES)) if token_id != EOS]

# ---------------------------------------------------------------------- masks


@settings(max_examples=60)
@given(texts=st.lists(st.text('abcé\n"\\', min_size=1, max_size=6), min_size=1, max_size=5), data=st.data())
@pytest.mark.slow
def test_masks_of_choices_against_prefixes_of_their_bytes(texts: list[str], data: st.DataObject) -> None:
    """A token is allowed if the text with it is the beginning of a choice. EOS is allowed after a whole choice."""
    matcher = COMPILER.new_matcher(Grammar.choice(texts))
    choices = {text.encode() for text in texts}
    said = b""
    while not matcher.complete:
        expected = {
            token_id for token_id in TOKENS if any(c.startswith(said + bytes_of(token_id)) for c in choices)
        }
        ends = {EOS} if said in choices else set()
        found = allowed(matcher)
        assert allowed(matcher) == found, "to ask changes nothing"
        if ends or len({c[len(said)] for c in choices if c.startswith(said)}) > 1:
            assert found == expected | ends
        else:  # a forced byte may be restricted to the token that the tokenizer would choose
            assert found
            assert found <= expected
        token_id = data.draw(st.sampled_from(sorted(found)))
        matcher.advance(token_id)
        said += b"" if token_id == EOS else bytes_of(token_id)
        if token_id == EOS:
            break
    assert said in choices
    assert matcher.complete


def test_held_back_tokens_come_only_if_no_other_may() -> None:
    matcher = COMPILER.new_matcher(Grammar.regex("a+b?"))
    a, b = ord("a"), ord("b")
    matcher.advance(a)
    either = {a, b, EOS, EOS + 1 + PIECES.index(b"ab")}
    assert allowed(matcher) == either
    assert allowed(matcher, [EOS]) == either - {EOS}
    assert allowed(matcher, [EOS, a, 0]) == either - {EOS, a}
    assert allowed(matcher, sorted(either)) == either
    assert allowed(matcher) == either, "it is held back from this mask alone"
    matcher = COMPILER.new_matcher(Grammar.regex(""))
    assert allowed(matcher, [EOS]) == {EOS}


def test_guesses_are_cut_to_a_grammar_or_replaced_by_forced_tokens() -> None:
    free, forcing = (COMPILER.new_matcher(Grammar.regex(text)) for text in ("[wx]z+", "qabab[wx]"))
    w, z, q = map(ord, "wzq")
    assert free.revise([w, z, z, q, z], 5) == ([w, z, z], False)
    forced = forcing.forced()
    assert b"qabab".startswith(b"".join(map(bytes_of, forced)))
    assert len(forced) > 1
    assert forcing.revise([*forced, z, z], 9) == (forced, False)
    assert forcing.revise([q, w], 9) == forcing.revise([], 9) == (forced, True)
    assert forcing.revise([], 1) == ([q], True)
    assert forcing.forced() == forced, "nothing has changed"


def test_a_token_that_may_not_come_fails_and_stays_failed() -> None:
    matcher, other = (COMPILER.new_matcher(Grammar.regex("abc")) for _ in range(2))
    with pytest.raises(GrammarFailedError):
        matcher.advance(ord("b"))
    with pytest.raises(GrammarFailedError):
        allowed(matcher)
    other.advance(ord("a"))
    assert ord("b") in allowed(other), "another request of the same grammar knows nothing of it"


def test_a_grammar_that_grows_too_much_fails_on_the_way_and_fails_that_answer_alone() -> None:
    """The grammar grows only after 34 tokens, which is more than a trial computes."""
    grammar = Grammar.regex("y{34}(a|b|[a-z]{1,1000}){1,100000000}")
    matcher, other = COMPILER.new_matcher(grammar), COMPILER.new_matcher(grammar)

    def follow(matcher: Matcher, count: int) -> None:
        for i in range(count):
            matcher.mask()
            matcher.advance(ord("y" if i < 34 else "a"))

    with pytest.raises(GrammarFailedError, match="oo many"):
        follow(matcher, 300)
    follow(other, 40)
    follow(COMPILER.new_matcher(grammar), 40)


# ---------------------------------------------------------------------- rules


def accepts(grammar: Grammar, text: str, *, whole: bool = True) -> bool:
    """Return whether a text is one of a grammar's. Not `whole`: whether it begins one."""
    matcher = COMPILER.new_matcher(grammar)
    for byte in text.encode():
        if byte not in allowed(matcher):
            return False
        matcher.advance(byte)
    return not whole or matcher.complete or EOS in allowed(matcher)


POINTS = st.characters(exclude_categories=["Cs"]) | st.characters(max_codepoint=0xFF)


@settings(max_examples=25)
@given(first=POINTS, second=POINTS, last=POINTS)
@pytest.mark.slow
def test_escapes_of_code_points_in_gbnf(first: str, second: str, last: str) -> None:
    """As in llama.cpp, `\\x`, `\\u` and `\\U` take 2, 4 and 8 digits, and name a character."""
    low, high, other = sorted((first, second)), f"\\U{ord(last):08x}", ord(last)
    short = f"\\x{other:02X}" if other < 0x100 else f"\\u{other:04X}" if other < 0x10000 else high
    grammar = Grammar.context_free(f'root ::= "a{short}b" [\\U{ord(low[0]):08x}-\\U{ord(low[1]):08x}{short}]')
    around = {chr(max(ord(low[0]) - 1, 0)), *low, last, chr(min(ord(low[1]) + 1, 0x10FFFF)), "u", "\\", "]"}
    for each in around - {chr(0xD7FF + 1), chr(0xDFFF)}:
        assert accepts(grammar, f"a{last}b{each}") is (low[0] <= each <= low[1] or each == last)
    assert not accepts(grammar, f"a{chr(other ^ 1)}b{last}")


@pytest.mark.parametrize(
    ("rules", "good", "bad"),
    [
        (r'root ::= "caf\u00e9ab"', ["caféab"], ["cafe9ab"]),
        (r"root ::= [\U0001F600-\U0001F64F]+", ["😀🙏"], ["🚀", "1"]),
        (
            r'root ::= "\"" ([\x20\x21\x23-\x5b\x5d-\U0010FFFF] | "\\" ["\\bfnrt])* "\""',
            ['"é\\n[🦊"'],
            ['"""', '"\n"'],
        ),
        ('?start: sum\n\n?sum: NUMBER | sum "+" NUMBER\nNUMBER: /[0-9]+/', ["1+22"], ["+1"]),
        ('// "::=" is no rule\nstart: "::=" "a"', ["::=a"], ["a"]),
    ],
)
def test_rules_in_the_notations_of_llama_cpp_and_lark(rules: str, good: list[str], bad: list[str]) -> None:
    grammar = Grammar.context_free(rules)
    assert [accepts(grammar, text) for text in good + bad] == [True] * len(good) + [False] * len(bad)


# ---------------------------------------------------------------------- schemas


def walk(grammar: Grammar, seed: int) -> str | None:
    """Return a random answer, mostly of ASCII; None if it has 400 bytes before its end."""
    draw, matcher, said = random.Random(seed), COMPILER.new_matcher(grammar), bytearray()
    while len(said) < 400:
        tokens = [] if matcher.complete else sorted(allowed(matcher))
        if not tokens or (EOS in tokens and draw.random() < 0.5):
            return said.decode()
        tokens = [token_id for token_id in tokens if token_id < EOS]
        closing = [token_id for token_id in tokens if token_id in b'"}]']
        letters = [token_id for token_id in tokens if token_id in b"abc123 "]
        said.append(draw.choice((closing if draw.random() < 0.3 else letters) or tokens))
        matcher.advance(said[-1])
    return None


class Tree(BaseModel):
    name: str
    children: list[Tree] = []


class Named(BaseModel):
    tree: Tree | None = None
    others: dict[str, Tree]
    pair: tuple[int, Tree]


class Labelled(BaseModel):
    model_config = ConfigDict(json_schema_extra={"patternProperties": {"^x": {"type": "integer"}}})
    a: int


@pytest.mark.parametrize("model", [Tree, Named, Labelled])
def test_answers_have_only_properties_that_a_model_names(model: type[BaseModel]) -> None:
    """Answers are random, and validated by pydantic: no `extra` is sent, and any `extra` is forbidden."""
    grammar = Grammar.json_schema(model.model_json_schema())
    answers = [each for each in (walk(grammar, seed) for seed in range(60)) if each]
    assert len(set(answers)) > 5
    for each in answers:
        found = model.model_validate_json(each, extra="forbid" if model is not Labelled else "allow")
        assert all(name.startswith("x") for name in found.model_extra or {})


class Kind(Enum):
    A, B = "a", "b"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    mice: Annotated[int, Field(ge=0, le=9)] = 0


class Fox(BaseModel):
    kind: Literal["fox", "vixen"] = "fox"


class Records(BaseModel):
    kinds: dict[Kind, bool]
    one: dict[Literal["a"], bool]
    letters: dict[Annotated[str, Field(pattern="^[a-c]+$")], bool]


class Vixen(BaseModel):
    kind: Literal["fox"] = "fox"
    cubs: Literal["some"] = "some"


class Loner(BaseModel):
    kind: Literal["fox"] = "fox"
    cubs: Literal["none"] = "none"


class Den(BaseModel):
    pet: Annotated[Cat | Annotated[Vixen | Loner, Field(discriminator="cubs")], Field(discriminator="kind")]


class Pets(BaseModel):
    pet: Annotated[Cat | Fox, Field(discriminator="kind")]


FLAG = {"type": "boolean"}
NAMED = {"$defs": {"t": {"type": "string", "enum": ["t"]}, "n": {"type": ["integer", "null"]}}}
TAGGED = {
    "$defs": {
        "a": {"type": "object", "properties": {"k": {"const": 1}, "a": FLAG}, "required": ["k"]},
        "b": {"type": "object", "properties": {"k": {"enum": [2, True]}}, "required": ["k"]},
    }
}

#: A schema with keywords that the compiler does not follow as they stand, an answer of it, and what begins none.
SAID_OTHERWISE: list[tuple[dict[str, Any], str, str]] = [
    (
        Records.model_json_schema(),
        '{"kinds": {"b": true}, "one": {}, "letters": {"cab": false}}',
        '{"kinds": {"c',
    ),
    (Den.model_json_schema(), '{"pet": {"kind": "fox", "cubs": "none"}}', '{"pet": {"cubs": "none"}'),
    (Pets.model_json_schema(), '{"pet": {"kind": "vixen"}}', '{"pet": {}'),
    (
        {"type": "object", "propertyNames": {"type": "string", "title": "T"}, "additionalProperties": FLAG},
        '{"x": true}',
        '{"x": 1',
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["b", "a", 1]}, "properties": {"a": {"const": 5}}},
        '{"b": [], "a": 5}',
        '{"a": 6',
    ),
    ({"type": "object", "properties": {"a": FLAG}, "unevaluatedProperties": False}, '{"a": true}', '{"b'),
    ({"type": "object", "properties": {"a": FLAG}, "unevaluatedProperties": FLAG}, '{"b": true}', '{"b": 1'),
    ({"type": "object", "properties": {"a": {"not": {}}, "b": FLAG}}, '{"b": true}', '{"a'),
    ({"oneOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/n"}], **NAMED}, "null", '"n'),
    (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], **TAGGED},
        '{"k": 1, "a": true}',
        '{"k": 2, "a',
    ),
    (
        {"oneOf": [{"const": "t", "type": "string"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], **TAGGED},
        '{"k": 2}',
        '{"k": 2, "a',
    ),
    ({"type": "integer", "minimum": -(2**63), "maximum": 1e30}, "-12", '"'),
    ({"type": "array", "items": FLAG, "minItems": 1.0, "maxItems": 2.0}, "[true]", "[]"),
    ({"type": "boolean", "$schema": "https://json-schema.org/draft-07/schema#"}, "true", "1"),
    (
        {"properties": {"a": {"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "const": 1}}},
        '{"a": 1}',
        '{"a": 2',
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), SAID_OTHERWISE)
def test_schemas_said_in_other_keywords_ask_for_the_same(schema: dict[str, Any], good: str, bad: str) -> None:
    """Random answers are validated by jsonschema."""
    grammar, validator = Grammar.json_schema(schema), jsonschema.Draft202012Validator(schema)
    assert accepts(grammar, good)
    assert not accepts(grammar, bad, whole=False)
    for answer in filter(None, (walk(grammar, seed) for seed in range(30))):
        validator.validate(json.loads(answer))


# ---------------------------------------------------------------------- processor time


def test_a_budget_bounds_the_mean_and_how_far_it_is_exceeded() -> None:
    mean_s, burst_s = MaskBudget(1000).mean_s, MaskBudget.BURST_S
    steady = MaskBudget(1000)
    for _ in range(10_000):
        steady.charge(mean_s)
    steady.charge(burst_s * 0.99)
    with pytest.raises(OverBudgetError, match=r"budget is 2.05 ms a token and 100 ms"):
        steady.charge(burst_s * 0.99)
    thrifty = MaskBudget(1000)
    for _ in range(10_000):
        thrifty.charge(0.0)
    with pytest.raises(OverBudgetError):  # unused budget is not saved
        thrifty.charge(burst_s + 2 * mean_s)
    slow = MaskBudget(1000)
    for _ in range(5):
        slow.charge(0.02)
    with pytest.raises(OverBudgetError, match=r"took 20 ms of processor time a token \(6 tokens\)"):
        slow.charge(0.02)


def test_a_mask_is_computed_once_a_token_and_beside_its_owner() -> None:
    """`begin_mask` starts the computation and returns before it ends."""
    hold = threading.Event()
    matcher = slowed(COMPILER.new_matcher(Grammar.regex("ab")), 0.0, hold)
    matcher.begin_mask()
    filling = matcher._filling
    matcher.begin_mask()
    assert matcher._filling is filling
    hold.set()
    assert allowed(matcher) == allowed(matcher)
    assert matcher._filling is filling
    matcher.advance(ord("a"))
    assert ord("b") in allowed(matcher)


# ---------------------------------------------------------------------- tokenizers


def test_a_model_without_an_eos_token_is_a_refusal() -> None:
    with pytest.raises(InvalidGrammarError, match="EOS"):
        GrammarCompiler(byte_tokenizer(), []).new_matcher(Grammar.regex("a?b"))


# ---------------------------------------------------------------------- refusals

#: A grammar that compiles in a millisecond, and whose masks take 10 ms and more after some tokens: each rule may
#: begin or end with any number of the others. On a fast computer the parser's limit on items is exceeded first.
AMBIGUOUS = "\n".join(
    ["start: s*", "s: " + " | ".join(f"r{i}" for i in range(8)), *(f"r{i}: s* /[a-z ]/ s*" for i in range(8))]
)
# name: a grammar, and parts of reasons for which it may be refused.
REFUSED: dict[str, tuple[Grammar, *tuple[str, ...]]] = {
    "type": (Grammar.json_schema({"type": "text"}), "Invalid type: text"),
    "unsupported": (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "nested unsupported": (Grammar.json_schema({"properties": {"a": {"not": FLAG}}}), '"not"'),
    "unsupported beside a format": (
        Grammar.json_schema({"type": "array", "items": {"format": "colour"}, "uniqueItems": True}),
        "uniqueItems",
    ),
    "overlapping alternatives": (
        Grammar.json_schema({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}),
        "write anyOf",
    ),
    "alternatives that only closing tells apart": (
        Grammar.json_schema(
            {
                "oneOf": [{"$ref": "#/$defs/a", "required": ["c"]}, {"$ref": "#/$defs/b"}],
                "discriminator": {"propertyName": "t"},
                "$defs": {
                    "a": {"type": "object", "properties": {"t": {"const": 1}, "c": {"const": 1}}},
                    "b": {"type": "object", "properties": {"n": {"const": 3}}},
                },
            }
        ),
        "write anyOf",
    ),
    "reference": (Grammar.json_schema({"$ref": "#/$defs/nowhere"}), "nowhere"),
    "another's": (Grammar.json_schema({"$ref": "http://example.com/schema"}), "example.com"),
    "unsatisfiable": (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    "nothing": (Grammar.json_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}), "a"),
    "endless": (Grammar.json_schema({"$ref": "#"}), "no text matches it"),
    "no json": (Grammar.json_schema("{oops"), "line 1"),
    "no schema": (Grammar.json_schema("[1]"), ""),
    "look-around": (Grammar.regex("a(?=b)"), "look-ahead"),
    "back reference": (Grammar.regex(r"(a)\1"), "backreferences"),
    "brackets": (Grammar.regex("[a-z"), "unclosed"),
    "pattern": (Grammar.json_schema({"type": "string", "pattern": "^(?!a)"}), "pattern: look-around"),
    "depth of a regex": (Grammar.regex("(" * 1000 + "a" + ")" * 1000), "nest"),
    "combinations": (
        Grammar.json_schema(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{i}{j}": {}}, "required": [f"{i}{j}"]} for j in "abcdefgh"]}
                    for i in "12345678"
                ]
            }
        ),
        "too large",
    ),
    "unknown rule": (Grammar.context_free("start: nowhere"), "nowhere"),
    "no grammar": (Grammar.context_free("hello there"), "there"),
    "brackets of rules": (Grammar.context_free("start: " + "(" * 10_000 + '"a"' + ")" * 10_000), "nested"),
    "length": (Grammar.regex("a" * (MAX_GRAMMAR_CHARACTERS + 1)), "65537 characters"),
    "time": (Grammar.json_schema({"type": "integer", "multipleOf": 999_999}), "too much time"),
    "ambiguous": (Grammar.context_free(AMBIGUOUS), "a trial answer fails after"),
    "a row": (
        Grammar.context_free("start: (" + " | ".join(f'"{i}"' for i in range(1500)) + ")+"),
        "has 1503 items",
    ),
    # Its first mask takes 0.8 s of processor time on one machine, so more than the limit of 1 s on a slower one.
    "what grows": (Grammar.regex("a{1000000000}"), "after 1 token: ", "too much time"),
    "rules that grow": (Grammar.context_free('start: a{1,1000000000}\na: "x"{1000000}'), "after 1 token: "),
    "depth": (
        Grammar.context_free("".join(f"a{i}: a{i + 1}\n" for i in range(4000)) + 'a4000: "x"\nstart: a0'),
        "too deep",
    ),
}


#: Those of `REFUSED` that are compiled until the limit of time.
LONG = ("time", "ambiguous", "what grows", "rules that grow")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in REFUSED]
)
def test_refusals_say_why_and_the_next_is_compiled(name: str) -> None:
    grammar, *reasons = REFUSED[name]
    with pytest.raises(InvalidGrammarError) as refused:
        COMPILER.new_matcher(grammar)
    assert any(reason in str(refused.value) for reason in reasons), refused.value
    assert "\n" not in str(refused.value)
    assert ord("a") in allowed(COMPILER.new_matcher(Grammar.regex(f"a{{{len(name)}}}")))


def test_integers_that_are_too_long_are_refused_before_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.constrained.grammar.json.dumps", None)
    for schema in ({"maximum": 10**308}, {"enum": [[{"a": -(10**400)}]]}):
        with pytest.raises(InvalidGrammarError, match="308 digits"):
            Grammar.json_schema(schema)
    with pytest.raises(InvalidGrammarError, match="characters are too many"):
        Grammar.json_schema({"enum": [2**1000] * 1000})


# ---------------------------------------------------------------------- the trial


def compiler_with(
    monkeypatch: pytest.MonkeyPatch, started: Callable[[subprocess.Popen[str]], None]
) -> GrammarCompiler:
    """Return a compiler that calls `started` with each of its trial processes."""
    compiler = GrammarCompiler(byte_tokenizer(), [EOS])
    trial = type(compiler._trial)
    start = trial._start

    def starting(options: Any) -> subprocess.Popen[str]:
        process = start(options)
        started(process)
        return process

    monkeypatch.setattr(trial, "_start", staticmethod(starting))
    return compiler


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_a_grammar_is_tried_once_and_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    tried: list[str] = []
    compiler = compiler_with(monkeypatch, started.append)
    run = type(compiler._trial).run

    def running(self, grammar, options):  # type: ignore[no-untyped-def]
        tried.append(grammar.text)
        return run(self, grammar, options)

    monkeypatch.setattr(type(compiler._trial), "run", running)
    for pattern in ("a", "b", "a", "b", "c"):
        assert allowed(compiler.new_matcher(Grammar.regex(pattern))) == {ord(pattern)}
    assert tried == ["a", "b", "c"]
    assert len(started) == 1
    kill(started[0])
    assert allowed(compiler.new_matcher(Grammar.regex("d"))) == {ord("d")}
    assert len(started) == 2


def test_a_trial_that_was_killed_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_with(monkeypatch, kill)
    with pytest.raises(InvalidGrammarError, match="again"):
        compiler.new_matcher(Grammar.regex("a"))
    monkeypatch.undo()
    assert allowed(compiler.new_matcher(Grammar.regex("a"))) == {ord("a")}


def test_a_known_grammar_does_not_wait_for_a_trial_and_close_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(byte_tokenizer(), [EOS])
    compiler.new_matcher(Grammar.regex("a"))
    process = compiler._trial._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)  # a trial that never ends
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(compiler.new_matcher, Grammar.regex(pattern)) for pattern in "bc"]
        assert allowed(compiler.new_matcher(Grammar.regex("a"))) == {ord("a")}
        assert not any(each.done() for each in asked)
        compiler.close()
        compiler.close()
        assert [type(each.exception()) for each in asked] == [ShuttingDownError] * 2
    with pytest.raises(ShuttingDownError):
        compiler.new_matcher(Grammar.regex("d"))
    assert allowed(compiler.new_matcher(Grammar.regex("a"))) == {ord("a")}


def test_the_trial_ends_with_its_compiler() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), [EOS])
    compiler.new_matcher(Grammar.regex("a"))
    process = compiler._trial._process
    assert process is not None
    assert process.poll() is None
    del compiler
    gc.collect()
    assert process.wait(10) is not None
