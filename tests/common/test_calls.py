"""Tool calls: the functions as a model's prompt shows them, and answers that follow the grammar of calls."""

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

from common.constrained import trial as grammar_trial
from common.constrained.tool_calls import (
    MAX_CALLS,
    Function,
    ToolUse,
    behind_thought,
    call_for_template,
    told_in_messages,
    with_short_ids,
    written,
)
from common.errors import InvalidGrammarError
from common.server.api.parts import new_reader
from common.text.dialect import (
    ARGS,
    CALL_MARKERS,
    HERMES_MARKERS,
    MISTRAL_MARKER,
    PYTHON_TAG,
    THOUGHT_MARKERS,
    CallSyntax,
    Dialect,
)
from tests.server.test_parts import read as read_parts

#: Mostly names of arguments, and some that are no identifiers in Python.
NAMES = st.sampled_from(
    ["city", "days", "n", "unit", "a_b", "x1", "über", "class", "a b", "a-b", '"', "$ref", ""]
)

BOUNDS = st.integers(-50, 50)


def _numbers() -> st.SearchStrategy[dict[str, Any]]:
    kinds = st.sampled_from(["integer", "number"])
    bounded = st.builds(
        lambda kind, low, span: {"type": kind, "minimum": low, "maximum": low + span},
        kinds,
        BOUNDS,
        st.integers(0, 50),
    )
    return bounded | st.builds(lambda kind: {"type": kind}, kinds)


def _strings() -> st.SearchStrategy[dict[str, Any]]:
    lengths = st.builds(
        lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
        st.integers(0, 3),
        st.integers(0, 4),
    )
    patterns = st.sampled_from(["^[a-z]{1,3}$", "^[A-Z][0-9]+$", "^(yes|no)$"])
    formats = st.sampled_from(["date", "time", "ipv4"])
    return (
        lengths
        | st.builds(lambda pattern: {"type": "string", "pattern": pattern}, patterns)
        | st.builds(lambda name: {"type": "string", "format": name}, formats)
    )


VALUES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)

LEAVES = (
    _numbers()
    | _strings()
    | st.sampled_from([{"type": "boolean"}, {"type": "null"}])
    | st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3))
    | st.builds(lambda value: {"const": value}, VALUES)
)


def _object(properties: dict[str, Any], optional: list[str], closed: bool | None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    required = [name for name in properties if name not in optional]
    if required:
        schema["required"] = required
    return schema if closed is None else schema | {"additionalProperties": not closed}


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for schemas of objects with values from `inner`."""
    closed = st.sampled_from([True, True, None, False])
    return st.builds(_object, st.dictionaries(NAMES, inner, max_size=4), st.lists(NAMES, max_size=6), closed)


def _nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, low, span: {"type": "array", "items": items, "minItems": low, "maxItems": low + span},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    choices = st.builds(lambda each: {"anyOf": each}, st.lists(inner, min_size=1, max_size=2))
    return arrays | choices | objects(inner)


TREE = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the parameters of a function. Some refer to definitions, which may refer to themselves."""
    schema = draw(objects(st.recursive(LEAVES, _nested, max_leaves=5)))
    if draw(st.booleans()):
        schema["$defs"] = {"leaf": draw(LEAVES), "tree": TREE}
        schema["properties"]["of"] = {"$ref": draw(st.sampled_from(["#/$defs/leaf", "#/$defs/tree"]))}
    if draw(st.integers(0, 4)) == 0:
        schema["description"] = draw(st.text(max_size=9))
    return schema


SYNTAXES: tuple[CallSyntax, ...] = ("hermes", "llama3_json", "mistral", "pythonic")
MARKERS = (*THOUGHT_MARKERS, *HERMES_MARKERS, PYTHON_TAG, MISTRAL_MARKER)
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"]}
WEATHER = Function("weather", "Tells the weather.", CITY)
ADD = Function(
    "add", None, {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}}
)


def byte_tokenizer(*, special: bool) -> tokenizers.Tokenizer:
    """Return a tokenizer with a token for each byte, a few longer ones, and EOS. `special`: also one per marker."""
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
    """Return whether a grammar accepts a text as a complete answer."""
    matcher = matcher_of(grammar, special=special)
    ids = BACKENDS[special].encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def random_answer(grammar: Any, seed: int, *, special: bool = False, thinking: bool = False) -> str:
    """Draw an answer of allowed tokens. After 40 tokens it prefers tokens that bring the answer to its end."""
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
                token_id = closing[begun] if closing[begun] in allowed else token_id  # not within a character
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
    """Return an answer's text, its thoughts, and name and arguments of its calls."""
    reader = new_reader(which, names=names, thinking=thinking)
    assert reader is not None
    return read_parts(reader, text)


# ---------------------------------------------------------------------- schemas


@settings(max_examples=15)
@given(st.data())
@pytest.mark.slow
def test_required_calls_follow_random_schemas(drawn: st.DataObject) -> None:
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


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
MORE = {"properties": {"y": {"type": "integer"}}, "required": ["y"]}
#: Schemas, arguments that fit them, and arguments that fit only if unlisted properties may come.
OPEN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}, {"a": 1}),
    "no properties": ({"type": "object", "title": "F"}, {}, {"a": 1}),
    "listed": (POINT, {"x": 1}, {"x": 1, "a": 1}),
    "inside": ({"properties": {"p": POINT}}, {"p": {"x": 1}}, {"p": {"x": 1, "a": 1}}),
    "in a list": (
        {"properties": {"p": {"type": "array", "items": POINT}}},
        {"p": [{"x": 1}]},
        {"p": [{"x": 1, "a": 1}]},
    ),
    "by name": (
        {"properties": {"p": {"$ref": "#/$defs/p"}}, "$defs": {"p": POINT}},
        {"p": {"x": 1}},
        {"p": {"x": 1, "a": 1}},
    ),
    "one of two": (
        {"properties": {"p": {"anyOf": [POINT, {"type": "null"}]}}},
        {"p": {"x": 1}},
        {"p": {"a": 1}},
    ),
}
#: Schemas that ask for properties which they do not list, and arguments with some.
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "any": (POINT | {"additionalProperties": True}, {"x": 1, "a": 1}),
    "a form": (POINT | {"additionalProperties": {"type": "integer"}}, {"x": 1, "a": 1}),
    "a map": ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1}),
    "names of a form": (POINT | {"patternProperties": {"^a": {"type": "integer"}}}, {"x": 1, "a": 1}),
    "a map inside": ({"properties": {"p": {"type": "object"}}, "required": ["p"]}, {"p": {"a": 1}}),
    "required": ({"properties": {"x": {}}, "required": ["y"]}, {"y": 1}),
    "both": ({"allOf": [POINT, MORE]}, {"x": 1, "y": 1}),
    "both by name": ({"allOf": [{"$ref": "#/$defs/p"}, MORE], "$defs": {"p": POINT}}, {"x": 1, "y": 1}),
    "beside alternatives": (POINT | {"anyOf": [MORE, {"required": ["x"]}]}, {"x": 1, "y": 1}),
}


@pytest.mark.parametrize("syntax", ["hermes", "llama3_json"])
def test_a_call_has_the_listed_properties_unless_the_schema_asks_for_others(syntax: CallSyntax) -> None:
    def takes(schema: dict[str, Any], arguments: dict[str, Any]) -> bool:
        use = ToolUse((), (Function("f", None, schema),), required=True, parallel=False)
        return accepts(
            use.grammar(dialect(syntax)), written(syntax, [call_for_template("", "f", json.dumps(arguments))])
        )

    for schema, fits, other in OPEN.values():
        jsonschema.validate(fits, schema)
        assert (takes(schema, fits), takes(schema, other)) == (True, False), schema
    for schema, fits in ASKED.values():
        jsonschema.validate(fits, schema)
        assert takes(schema, fits), schema


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


# ---------------------------------------------------------------------- answers that may be calls

ROME, NO_ROME = '{"city": "Rome"}', '{"city": 5}'
#: Text of one call of `weather` with these arguments, and of the same call twice.
ONE: dict[CallSyntax, str] = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": %s}]',
    "pythonic": "[weather(**%s)]",
}
TWICE: dict[CallSyntax, str] = {
    "hermes": "{0}\n{0}",
    "llama3_json": "{0}; {0}",
    "pythonic": "[weather({0}), weather({0})]",
}
BEGINS_LIKE_A_CALL: dict[CallSyntax, str] = {
    "hermes": "Well, <tool_call>no",
    "llama3_json": '{"a": 1}',
    "mistral": "Well, [TOOL_CALLS]no",
    "pythonic": '["a"]',
}


def one_call(syntax: CallSyntax, arguments: str) -> str:
    """Return the text of a call in a syntax. In Python's syntax the arguments are keywords."""
    if syntax != "pythonic":
        return ONE[syntax] % arguments
    return "[weather(" + ", ".join(f"{k}={json.dumps(v)}" for k, v in json.loads(arguments).items()) + ")]"


def two_calls(syntax: CallSyntax) -> str:
    if syntax == "mistral":
        return written(syntax, [call_for_template("", "weather", ROME)] * 2)
    return TWICE[syntax].format('city="Rome"' if syntax == "pythonic" else one_call(syntax, ROME))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_strict_call_is_free_to_come_and_not_free_in_its_arguments(
    syntax: CallSyntax, thinks: bool, special: bool
) -> None:
    functions = (dataclasses.replace(WEATHER, strict=True), ADD)
    use, which = ToolUse(functions, functions), dialect(syntax, special=special, thinks=thinks)
    grammar = use.grammar(which)
    for text in ("", "Hello.", " \n It is {warm} [there].", one_call(syntax, ROME), two_calls(syntax)):
        assert accepts(grammar, text, special=special), text
    wrong = (one_call(syntax, NO_ROME), one_call(syntax, "{}"), f"[{one_call(syntax, NO_ROME)}]")
    for text in (*wrong, BEGINS_LIKE_A_CALL[syntax]):
        assert not accepts(grammar, text, special=special), text
    if syntax in CALL_MARKERS:
        assert accepts(grammar, "I look. " + one_call(syntax, ROME), special=special)
        # A function that is not strict takes any object.
        assert accepts(grammar, (ONE[syntax] % '{"a": "b"}').replace("weather", "add"), special=special)
    if thinks:
        assert accepts(grammar, "<think>Hm.</think>\n\n" + one_call(syntax, ROME), special=special)
        assert not accepts(grammar, "<think>Hm.</think>\n\n" + one_call(syntax, NO_ROME), special=special)
        assert accepts(grammar, "<think>Hm.</think>\n\nHello.", special=special)


def test_mistrals_calls_where_names_come_first() -> None:
    functions = (dataclasses.replace(WEATHER, strict=True), ADD)
    names = {MISTRAL_MARKER: MISTRAL_MARKER, ARGS: PYTHON_TAG}  # any token
    special = {marker: BACKENDS[True].token_to_id(token) for marker, token in names.items()}
    which = Dialect(calls="mistral", special=special)

    def takes(text: str, **fields: Any) -> bool:
        grammar = ToolUse(functions, functions, **fields).grammar(which)
        return accepts(grammar, text.replace(ARGS, PYTHON_TAG), special=True)

    one, other = f"[TOOL_CALLS]weather[ARGS]{ROME}", '[TOOL_CALLS]add[ARGS]{"a": 1}'
    assert takes("I look. " + one + other)
    assert takes(one + other, required=True)
    assert not takes(one + other, parallel=False)
    assert not takes("I look. " + one, required=True)
    assert not takes(one.replace(ROME, NO_ROME))
    assert not takes(f"[TOOL_CALLS]weather{ROME}", required=True)


def test_ids_that_mistrals_templates_refuse_become_others() -> None:
    calls = [call_for_template(each, "weather", ROME) for each in ("Abc123xyz", "call_1", "")]
    results = [{"role": "tool", "content": "20", "tool_call_id": each["id"]} for each in calls]
    asked = {"role": "user", "content": "Rome?"}
    first, message, *answers = with_short_ids(
        [asked, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    )
    ids = [call["id"] for call in message["tool_calls"]]
    assert first == asked
    assert ids[0] == "Abc123xyz"
    assert len(set(ids)) == 3
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert [each["tool_call_id"] for each in answers] == ids
    assert calls[1]["id"] == "call_1"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_an_answer_of_a_form_or_a_call(syntax: CallSyntax, thinks: bool, special: bool) -> None:
    form = {"type": "object", "properties": {"name": {"type": "integer"}}, "additionalProperties": False}
    strict = dataclasses.replace(WEATHER, strict=True)
    use, which = ToolUse((strict,), (strict,)), dialect(syntax, special=special, thinks=thinks)
    grammar = use.grammar(which, otherwise=form)
    for text in (one_call(syntax, ROME), '{"name": 1}', "{}"):
        assert accepts(grammar, text, special=special), text
    for text in ("Hello.", '{"name": "weather"}', one_call(syntax, NO_ROME)):
        assert not accepts(grammar, text, special=special), text


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_only_the_functions_that_may_be_called_are_called(syntax: CallSyntax) -> None:
    grammar = ToolUse((WEATHER, ADD), (ADD,), required=True).grammar(dialect(syntax))
    assert not accepts(grammar, one_call(syntax, ROME))
    assert not accepts(grammar, "Hello.")


def test_a_schema_that_no_grammar_can_follow_is_named_and_left_out() -> None:
    def check(grammar: Any) -> None:
        try:
            matcher_of(grammar)
        except ValueError as error:
            raise InvalidGrammarError(str(error)) from None

    good = dataclasses.replace(WEATHER, strict=True)
    wrong = Function(
        "wrong", None, {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, strict=True
    )
    use = ToolUse((good, wrong, ADD), (good, wrong, ADD))
    reasons = use.refusals(dialect("hermes"), check)
    assert list(reasons) == ["wrong"]
    assert "not" in reasons["wrong"]
    assert use.without_schemas(reasons).followed == (good,)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_arguments_that_are_no_object_stay_a_text(syntax: CallSyntax) -> None:
    for arguments in ("[1]", '{"a": '):
        call = call_for_template("1", "weather", arguments)
        assert call["function"]["arguments"] == arguments
        assert arguments in written(syntax, [call]) or json.dumps(arguments) in written(syntax, [call])


# ---------------------------------------------------------------------- what a model is told

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("syntax", SYNTAXES)
@given(
    arguments=st.dictionaries(st.sampled_from(["city", "a b", "x"]) | st.text(max_size=3), VALUES, max_size=3)
)
def test_a_call_that_is_written_is_read_as_it_was(syntax: CallSyntax, arguments: dict[str, Any]) -> None:
    call = call_for_template("1", "weather", json.dumps(arguments))
    said, _, calls = read(dialect(syntax), written(syntax, [call, call]), ["weather"])
    assert (said, [(name, json.loads(text)) for name, text in calls]) == ("", [("weather", arguments)] * 2)


def test_tools_are_told_in_plain_messages() -> None:
    calls = [call_for_template(str(n), "weather", json.dumps({"city": city})) for n, city in enumerate("AB")]
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is it warm?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "content": "20", "name": "weather", "tool_call_id": "0"},
        {"role": "tool", "content": "30", "name": "weather", "tool_call_id": "1"},
    ]
    system, user, assistant, results = told_in_messages("hermes", conversation, [WEATHER])
    assert system["content"].startswith("Be brief.\n\n")
    assert json.dumps(WEATHER.as_tool()) in system["content"]
    assert "<tool_call>" in system["content"]
    assert user == conversation[1]
    assert assistant["content"].startswith("I look.\n<tool_call>\n")
    assert "tool_calls" not in assistant
    assert results == {
        "role": "user",
        "content": "<tool_response>\n20\n</tool_response>\n<tool_response>\n30\n</tool_response>",
    }
    system, *_ = told_in_messages("pythonic", conversation[1:], [WEATHER])
    assert (system["role"], "func_name1" in system["content"]) == ("system", True)
    assert told_in_messages("hermes", conversation[:2], []) == conversation[:2]


NUMBER = {"$ref": "#/$defs/number"}


SCHEMAS: list[tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = [
    ({"properties": {"n": NUMBER}, "$defs": {"number": {"type": "integer"}}}, [{}, {"n": 1}], [{"n": "1"}]),
    ({"$ref": "#/$defs/o", "$defs": {"o": {"required": ["a"], **CITY}}}, [{"city": "a"}], [{}]),
    ({"anyOf": [CITY, {"required": ["n"], "properties": {"n": {"const": 1}}}]}, [{"n": 1}], [{"n": 2}]),
    ({"properties": {"me": {"$ref": "#"}}, "additionalProperties": False}, [{"me": {"me": {}}}], [{"me": 1}]),
    ({"type": ["object", "null"], **CITY}, [{"city": "a"}], []),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), SCHEMAS, ids=str)
@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("otherwise", [None, {"type": "integer"}])
def test_references_hold_within_a_call(
    syntax: CallSyntax,
    schema: dict[str, Any],
    right: list[dict[str, Any]],
    wrong: list[dict[str, Any]],
    otherwise: dict[str, Any] | None,
) -> None:
    function = Function("weather", None, schema)
    grammar = ToolUse((function,), (function,), required=True).grammar(dialect(syntax), otherwise=otherwise)
    texts = {
        json.dumps(each): (one_call(syntax, json.dumps(each)), ONE[syntax] % json.dumps(each))
        for each in right + wrong
    }
    for each in right:
        assert any(accepts(grammar, text) for text in texts[json.dumps(each)]), each
    for each in wrong:
        assert not any(accepts(grammar, text) for text in texts[json.dumps(each)]), each
