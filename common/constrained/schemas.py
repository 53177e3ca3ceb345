"""JSON Schemas as clients send them: their size, and rewritings before they become grammars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from common.errors import InvalidGrammarError

#: The least integer that a schema must not have. Python writes such long integers slowly, and grammars cannot
#: follow integers that no float holds.
TOO_LARGE = 10**308

#: Keywords whose values are plain JSON, not schemas.
_VALUES = frozenset({"const", "default", "enum", "examples"})

#: Keywords with a map from names to schemas.
_MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})

#: Keywords that list an object's properties.
_LISTS = frozenset({"properties", "patternProperties"})

#: Beside these keywords, a schema says itself which other properties an object may have, or it may be a part of
#: another schema that does.
_OPEN = frozenset(
    {"additionalProperties", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf", "propertyNames"}
    | {"minProperties", "unevaluatedProperties", "$dynamicRef", "$ref"}
)


def size(value: Any) -> int:
    """Return about how many characters a JSON value has when it is written.

    Raises:
        InvalidGrammarError: the value has an integer of more than 308 digits.
    """
    characters, waiting = 0, [value]
    while waiting:
        match each := waiting.pop():
            case str():
                characters += len(each) + 3
            case bool() | float() | None:
                characters += 6
            case int():
                if abs(each) >= TOO_LARGE:
                    raise InvalidGrammarError("an integer has more than 308 digits")
                characters += 2 + each.bit_length() // 3
            case dict():
                characters += 2
                waiting += each
                waiting += each.values()
            case list():
                characters += 2
                waiting += each
    return characters


def objects_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every JSON object in a value, the value itself included."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def asked(schema: Any) -> Any:
    """Return a schema without `"uniqueItems": false`, which asks for nothing. Grammars refuse the keyword."""
    if isinstance(schema, list):
        return [asked(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value
        if name in _VALUES
        else {key: asked(each) for key, each in value.items()}
        if name in _MAPS and isinstance(value, dict)
        else asked(value)
        for name, value in schema.items()
        if not (name == "uniqueItems" and value is False)
    }


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in which objects have no properties but those that are listed, by name or by pattern, unless
    the schema says more about others.

    A model that may add properties of its own does. llama.cpp and xgrammar read schemas in the same way.
    """
    # Schemas that are combined must stay open: each has properties that the others do not list.
    combined = any("allOf" in each or {"$ref", "properties"} <= each.keys() for each in objects_in(schema))
    return _closed(dict(schema), named=not combined)


def closed_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a call's arguments, closed. A function whose schema says nothing of any property takes
    none."""
    if not schema.keys() & (_OPEN | _VALUES | _LISTS) and not schema.get("required"):
        return {**schema, "properties": {}, "additionalProperties": False}
    return closed(schema)


def _each(value: Any) -> Any:
    return _closed(value) if isinstance(value, dict) else value


def _closed(schema: dict[str, Any], *, named: bool = True) -> dict[str, Any]:
    """Return `schema`, closed. `named`: its definitions are closed, too."""
    maps = [*_LISTS, *(["$defs", "definitions"] if named else [])]
    alternatives = [] if schema.keys() & {"required", *_LISTS} else ["anyOf", "oneOf"]
    result = dict(schema)
    for name, value in schema.items():
        if name in maps and isinstance(value, dict):
            result[name] = {key: _each(each) for key, each in value.items()}
        elif name in ("items", "additionalProperties"):
            result[name] = _each(value)
        elif name in ("prefixItems", *alternatives) and isinstance(value, list):
            result[name] = [_each(each) for each in value]
    if schema.keys() & _LISTS and not schema.keys() & _OPEN:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        listed = isinstance(properties, dict) and isinstance(required, list)
        if listed and all(isinstance(name, str) and name in properties for name in required):
            result["additionalProperties"] = False
    return result
