"""Forms that answers can be constrained to, each with a check that does not use the server's grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from common.constrained.grammar import Grammar


@dataclass(frozen=True)
class Form:
    name: str
    grammar: Grammar
    matches: Callable[[str], bool]

    def __str__(self) -> str:
        return self.name


def _described(name: str, schema: dict[str, Any]) -> Form:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )

    def matches(text: str) -> bool:
        try:
            # Dates of RFC 3339 have a year 0, Python's have not.
            return bool(validator.is_valid(json.loads(text.replace('"0000-', '"0004-'))))
        except json.JSONDecodeError:
            return False

    return Form(name, Grammar.json_schema(schema), matches)


def _regular(name: str, pattern: str) -> Form:
    return Form(name, Grammar.regex(pattern), lambda text: re.fullmatch(pattern, text) is not None)


def _chosen(name: str, *texts: str) -> Form:
    return Form(name, Grammar.choice(texts), lambda text: text in texts)


def _parsed(name: str, grammar: str, matches: Callable[[str], bool]) -> Form:
    return Form(name, Grammar.context_free(grammar), matches)


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _is_sum(text: str) -> bool:
    """Return whether a text is a sum of up to four terms: numbers, or sums of two numbers in brackets."""
    number = "[1-9][0-9]?"
    term = rf"({number}|\({number}\+{number}\))"
    return re.fullmatch(rf"{term}(\+{term}){{0,3}}", text) is not None


WORD = {"type": "string", "pattern": "^[a-z]{2,9}$"}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}
SPOT = _object(x=COUNT, y=COUNT)

FORMS = [
    _described("flat", _object(name=WORD, age=COUNT, known={"type": "boolean"})),
    _described("nested", _object(who=_object(name=WORD, where=_object(town=WORD, floor=COUNT)), n=COUNT)),
    _described("bounded array", {"type": "array", "items": COUNT, "minItems": 2, "maxItems": 4}),
    _described("objects in an array", {"type": "array", "items": SPOT, "maxItems": 3}),
    _described("tuple", {"type": "array", "prefixItems": [WORD, COUNT], "items": False, "minItems": 2}),
    _described("enum", {"enum": ["red", "green", 7, None, True, [1, 2], {"a": "b"}]}),
    _described("const", {"const": {"version": 1.5, "tags": ["a b", 'c\n"d"']}}),
    _described("any of", {"anyOf": [COUNT, _object(word=WORD), {"type": "null"}]}),
    _described("one of", {"oneOf": [_object(cat=WORD), _object(dog=COUNT)]}),
    _described(
        "all of",
        {"allOf": [{"type": "object", "properties": {"a": COUNT}, "required": ["a"]}, _object(a={}, b=WORD)]},
    ),
    _described(
        "ref", {"$defs": {"spot": _object(x=COUNT, y=COUNT)}} | _object(a={"$ref": "#/$defs/spot"}, b=COUNT)
    ),
    _described(
        "recursive",
        {
            "$defs": {"tree": _object(left={"anyOf": [{"$ref": "#/$defs/tree"}, COUNT]})},
            "$ref": "#/$defs/tree",
        },
    ),
    _described("integer range", _object(low={"type": "integer", "minimum": -13, "exclusiveMaximum": 1200})),
    _described("number range", _object(share={"type": "number", "minimum": 0, "maximum": 1})),
    _described(
        "multiple", _object(sevens={"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700})
    ),
    _described("pattern", _object(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"})),
    _described("string length", _object(text={"type": "string", "minLength": 3, "maxLength": 12})),
    _described("date", _object(day={"type": "string", "format": "date"})),
    _described("unicode", {"enum": ["naïve café", "Ünïcödé", "日本語", "🦊🐻", "tab\there"]}),
    _described(
        "optional", {"type": "object", "properties": {"a": COUNT, "b": WORD}, "additionalProperties": False}
    ),
    _described(
        "additional properties",
        {"type": "object", "properties": {"a": COUNT}, "required": ["a"], "additionalProperties": COUNT},
    ),
    Form("json object", Grammar.json_object(), lambda text: isinstance(json.loads(text), dict)),
    _regular("telephone", r"\+49 [1-9][0-9]{2,3}(-[0-9]{2}){2}"),
    _regular("alternatives", r"(The (cat|dog)|An? [a-z]{3,7}) (sat|ran)\."),
    _regular("letters of any script", r"[äöüß日🦊]{3,5}!"),
    _regular("an end that may come or not", r"[a-z ]{5,20}"),
    _chosen("choice", "yes", "no", "perhaps"),
    _chosen("choices that begin alike", "a", "ab", "abc", "b"),
    _chosen("unicode choices", "déjà vu", '🦊 "quoted"', "line\nbreak", "back\\slash"),
    _parsed(
        "lark",
        'start: sum\nsum: term ("+" term){0,3}\nterm: NUMBER | "(" NUMBER "+" NUMBER ")"\nNUMBER: /[1-9][0-9]?/',
        _is_sum,
    ),
    _parsed(
        "gbnf",
        'root ::= item (", " item)*\nitem ::= "one" | "two" | [0-9] [0-9]\n',
        lambda text: all(re.fullmatch("one|two|[0-9][0-9]", item) for item in text.split(", ")),
    ),
]
