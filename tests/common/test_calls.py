"""Tool calls: what a model is told, and answers that follow the grammar of their calls."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.models import BPE

from common import grammar_trial
from common.calls import MAX_CALLS, Function, ToolUse, behind_thought
from common.dialect import HERMES_MARKERS, PYTHON_TAG, THOUGHT_MARKERS, CallSyntax, Dialect
from common.server.replies.parts import ArgumentsPart, CallPart, ReasoningPart, TextPart, new_reader
from tests.tool_schemas import parameters

SYNTAXES: tuple[CallSyntax, ...] = ("hermes", "llama3_json", "pythonic")
MARKERS = (*THOUGHT_MARKERS, *HERMES_MARKERS, PYTHON_TAG)
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"]}
WEATHER = Function("weather", "Tells the weather.", CITY)
ADD = Function(
    "add", None, {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}}
)


def byte_tokenizer(*, special: bool) -> tokenizers.Tokenizer:
    """A token for each byte, some of words, and EOS. `special`: one for each marker."""
    letters = list(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = ['{"', '":', '"}', "})", ")]", "ci", "we", "na", "ar"]
    vocabulary = {piece: number for number, piece in enumerate(sorted(letters) + words)}
    merges = [(word[0], word[1]) for word in words]
    backend = tokenizers.Tokenizer(BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if special:
        backend.add_special_tokens(list(MARKERS))
    backend.add_special_tokens(["<eos>"])
    return backend


BACKENDS = {special: byte_tokenizer(special=special) for special in (False, True)}
TOKENIZERS = {
    special: llguidance.LLTokenizer(
        backend.to_str(), n_vocab=backend.get_vocab_size(), eos_token=[backend.token_to_id("<eos>")]
    )
    for special, backend in BACKENDS.items()
}


def dialect(syntax: CallSyntax, *, special: bool = False, thinks: bool = False) -> Dialect:
    ids = {marker: BACKENDS[True].token_to_id(marker) for marker in MARKERS} if special else {}
    return Dialect(calls=syntax, knows_tools=True, thinks=thinks, special=ids)


def matcher_of(grammar: Any, *, special: bool = False) -> llguidance.LLMatcher:
    return grammar_trial.compile_grammar(TOKENIZERS[special], grammar.kind, grammar.text)


def accepts(grammar: Any, text: str, *, special: bool = False) -> bool:
    """Whether an answer may read so, and end there."""
    matcher = matcher_of(grammar, special=special)
    ids = BACKENDS[special].encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def random_answer(grammar: Any, seed: int, *, special: bool = False, thinking: bool = False) -> str:
    """An answer of allowed tokens, at random at first, and then of those that bring it to its end."""
    matcher, backend, draw = matcher_of(grammar, special=special), BACKENDS[special], random.Random(seed)
    ids: list[int] = []
    eos = backend.token_to_id("<eos>")
    closing = backend.encode(THOUGHT_MARKERS[1]).ids
    ends = [backend.token_to_id(piece) for piece in ('"', "}", "]", ")", ",")]
    while not matcher.is_stopped():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask).tolist()
        assert allowed, "some token may always come"
        assert len(ids) < 2000, backend.decode(ids, skip_special_tokens=False)
        token_id = draw.choice(allowed)
        if len(ids) > 40:
            if eos in allowed:
                break
            said = backend.decode(ids, skip_special_tokens=False)
            if (thinking or THOUGHT_MARKERS[0] in said) and THOUGHT_MARKERS[1] not in said:
                begun = max(n for n in range(len(closing)) if n == 0 or ids[-n:] == closing[:n])
                token_id = closing[begun] if closing[begun] in allowed else token_id  # within a character
            else:
                token_id = next((each for each in ends if each in allowed), token_id)
        if token_id == eos:
            break
        assert matcher.consume_token(token_id), matcher.get_error()
        ids.append(token_id)
    return str(backend.decode(ids, skip_special_tokens=False))


def read(
    which: Dialect, text: str, names: Any, *, thinking: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """The answer's text, its thoughts, and name and arguments of its calls."""
    reader = new_reader(which, names=names, thinking=thinking)
    assert reader is not None
    said, thought, calls = "", "", list[tuple[str, str]]()
    for part in reader.add(text) + reader.finish():
        match part:
            case TextPart(piece):
                said += piece
            case ReasoningPart(piece):
                thought += piece
            case CallPart(_, _, name):
                calls.append((name, ""))
            case ArgumentsPart(_, piece):
                calls[-1] = (calls[-1][0], calls[-1][1] + piece)
    return said, thought, calls


# ---------------------------------------------------------------------- schemas


def check_schemas(drawn: st.DataObject) -> None:
    syntax = drawn.draw(st.sampled_from(SYNTAXES))
    special, thinks = drawn.draw(st.booleans()), drawn.draw(st.booleans())
    schemas = drawn.draw(st.lists(parameters(), min_size=1, max_size=2))
    functions = tuple(Function(f"f{number}", None, each) for number, each in enumerate(schemas))
    use = ToolUse(functions, functions, required=True, parallel=drawn.draw(st.booleans()))
    which = dialect(syntax, special=special, thinks=thinks)
    thinking = thinks and drawn.draw(st.booleans())
    grammar = use.grammar(which, thinking=thinking)
    for seed in range(3):
        text = random_answer(grammar, seed, special=special, thinking=thinking)
        said, _, calls = read(which, text, use.names, thinking=thinking)
        assert said == "", text
        assert 1 <= len(calls) <= (MAX_CALLS if use.parallel else 1), text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[int(name[1:])])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_required_calls_follow_random_schemas(drawn: st.DataObject) -> None:
    check_schemas(drawn)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_required_calls_follow_many_random_schemas(drawn: st.DataObject) -> None:
    check_schemas(drawn)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("syntax", [None, *SYNTAXES])
def test_a_schema_holds_behind_the_thought(syntax: CallSyntax | None, special: bool) -> None:
    which = dataclasses.replace(dialect("hermes", special=special, thinks=True), calls=syntax)
    answer = '{"city": "Rome"}'
    may, must = (behind_thought(CITY, which, thinking=thinking) for thinking in (False, True))
    for thought in ("Hm, {[ <b> Rome?\n</think>\n\n", "</think>"):
        assert accepts(may, "<think>" + thought + answer, special=special)
        assert accepts(must, thought + answer, special=special)
    assert accepts(may, answer, special=special)
    assert not accepts(must, answer, special=special)
    for grammar, text in (
        (may, "Hm. " + answer),
        (must, "Hm.</think>" + answer + "!"),
        (must, "Hm.</think>"),
    ):
        assert not accepts(grammar, text, special=special)
