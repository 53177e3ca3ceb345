"""JSON Schemas as clients send them: their size, and rewritings before they become grammars."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from common.errors import InvalidGrammarError

#: The least integer that a schema must not have. Python writes such long integers slowly, and grammars cannot
#: follow integers that no float holds.
TOO_LARGE = 10**308

#: Keywords whose values are plain JSON, not schemas.
_VALUES = frozenset({"const", "default", "enum", "examples"})

#: Keywords with a map from names to schemas.
_MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})

#: Keys of a schema that only describe.
LABELS = frozenset(
    {
        "$comment",
        "$schema",
        "default",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)

#: Keywords by which a schema and others beside it say something of the same value.
_APPLICATORS = frozenset({"$dynamicRef", "$ref", "allOf", "anyOf", "dependentSchemas", "if", "oneOf"})

#: Keywords whose values are numbers of characters, items or properties.
_SIZES = frozenset({"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"})

#: Keywords that bound numbers, each after the sign of its furthest value.
_BOUNDS = ((1, "maximum"), (1, "exclusiveMaximum"), (-1, "minimum"), (-1, "exclusiveMinimum"))

#: The furthest bound of numbers that a grammar follows: the largest float below 2^63.
FURTHEST = 2**63 - 1024

#: Values of `$schema` that the compiler of grammars knows, written with `http` or `https`.
_DIALECT = re.compile(r"https?(://json-schema\.org/draft(?:(-0[467])|/2019-09|/2020-12)/schema#?)")

#: Most characters that a schema of named properties grows to: `propertyNames` has one schema for all of them.
MOST_COPIED = 16_384

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


# ---------------------------------------------------------------------- the same in other keywords


def asked(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that asks for the same by the keywords that grammars follow, as far as that is possible.

    | in `schema` | in the result |
    | --- | --- |
    | `"uniqueItems": false`, `propertyNames` of any text, a `$schema` that is not known | left out |
    | `propertyNames` with a pattern, or with names | these properties, and no others |
    | `unevaluatedProperties` beside no other schema | `additionalProperties` |
    | `oneOf` whose alternatives exclude each other | `anyOf` |
    | `{"not": {}}` | `false` |
    | `"minLength": 1.0` | `1` |
    | a bound of numbers that is too far | the furthest that is followed |
    """
    result = _asked(schema, schema)
    return result if isinstance(result, dict) else dict(schema)


def _asked(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return `asked` of a part of the schema `root`."""
    if isinstance(schema, list):
        return [_asked(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.keys() - LABELS == {"not"} and (schema["not"] is True or schema["not"] == {}):
        return False
    result = {
        name: value
        if name in _VALUES
        else {key: _asked(each, root) for key, each in value.items()}
        if name in _MAPS and isinstance(value, dict)
        else _asked(value, root)
        for name, value in schema.items()
        if not (name == "uniqueItems" and value is False)
    }
    if "$schema" in result:
        _name_dialect(result)
    if "unevaluatedProperties" in result and not result.keys() & _APPLICATORS:
        result.setdefault("additionalProperties", result.pop("unevaluatedProperties"))
    if "propertyNames" in result:
        _list_names(result, root)
    if isinstance(result.get("oneOf"), list) and "anyOf" not in result:
        _free_alternatives(result, root)
    for name in _SIZES & result.keys():
        match result[name]:
            case float(number) if number.is_integer():
                result[name] = int(number)
    for sign, name in _BOUNDS:
        bound = result.get(name)
        if isinstance(bound, int | float) and sign * bound > FURTHEST:
            result[name] = sign * FURTHEST
    return result


def _name_dialect(schema: dict[str, Any]) -> None:
    """Write `$schema` as the grammar's compiler knows it, or leave it out: it is a label."""
    known = _DIALECT.fullmatch(str(schema.pop("$schema")))
    if known:
        schema["$schema"] = f"http{'' if known[2] else 's'}{known[1]}"


def _list_names(schema: dict[str, Any], root: Mapping[str, Any]) -> None:
    """Change a schema's `propertyNames` to a list of properties, if it has names or a pattern and nothing else."""
    names = _followed(schema["propertyNames"], root)
    asks = {} if names is True else names
    if not isinstance(asks, dict):
        return
    asks = {name: value for name, value in asks.items() if name not in LABELS}
    if asks.get("type") == "string":
        del asks["type"]
    others = schema.get("additionalProperties", True)
    if "unevaluatedProperties" in schema and asks:
        return
    if len(asks) == 1 and (values := _values(asks)) and "patternProperties" not in schema:
        listed, names = schema.get("properties", {}), [name for _, name in values if isinstance(name, str)]
        if len(names) * size(others) > MOST_COPIED or not isinstance(listed, dict):
            return
        schema["properties"] = {name: listed.get(name, others) for name in names}
    elif asks.keys() == {"pattern"} and isinstance(asks["pattern"], str) and not schema.keys() & _LISTS:
        schema["patternProperties"] = {asks["pattern"]: others}
    elif asks:
        return
    del schema["propertyNames"]
    if asks:
        schema["additionalProperties"] = False


def _free_alternatives(schema: dict[str, Any], root: Mapping[str, Any]) -> None:
    """Change a schema's `oneOf` to `anyOf` if no value can match two alternatives.

    They differ in type, in their values, or in the values of a property that all of them require. The property of
    a `discriminator` is then required, too: pydantic leaves this out if the property has a default.
    """
    given, discriminator = schema["oneOf"], schema.get("discriminator")
    followed = [_followed(each, root) for each in given]
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if isinstance(name, str) and _exclusive(_tags(each, name, root) for each in given):
        given = [_requiring(each, name) for each in given]
    else:
        objects = [each for each in followed if _types(each) == ["object"]]
        types = [found for found in map(_types, followed) if found != ["object"]]
        shared = _required(objects[0]) if objects else []
        differ = len(objects) < 2 or any(
            _exclusive(_tags(each, name, root) if name in _required(each) else None for each in objects)
            for name in shared
        )
        apart = differ and _exclusive([*types, ["object"] if objects else []])
        if not apart and not _exclusive(map(_values, followed)):
            return
    del schema["oneOf"]
    schema["anyOf"] = given


def _followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the part of `root` that a schema only refers to, or else the schema; None: it refers to nothing."""
    for _ in range(9):  # a chain of references may have no end
        if not isinstance(schema, dict) or schema.keys() - LABELS != {"$ref"}:
            return schema
        begin, *path = str(schema["$ref"]).split("/")
        schema = root if begin == "#" else None
        for name in path:
            schema = (
                schema.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
            )
    return None


def _requiring(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a schema whose `_tags` are known, and that requires this property, too."""
    if isinstance(schema.get("anyOf"), list):
        return schema | {"anyOf": [_requiring(each, name) for each in schema["anyOf"]]}
    return schema | {"required": [*dict.fromkeys([*_required(schema), name])]}


def _required(schema: Any) -> list[str]:
    names = schema.get("required") if isinstance(schema, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _exclusive(alternatives: Iterable[Sequence[Any] | None]) -> bool:
    """Return whether all elements are known, and no two alternatives have one in common."""
    seen: set[Any] = set()
    for each in alternatives:
        if each is None or not seen.isdisjoint(each):
            return False
        seen.update(each)
    return True


def _types(schema: Any) -> list[str] | None:
    """Return the types of the values of a schema; None: any, or not known."""
    types = schema.get("type") if isinstance(schema, dict) else None
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
        return None
    return ["number" if each == "integer" else each for each in types]


def _values(schema: Any) -> list[tuple[bool, Any]] | None:
    """Return the values that `const` or `enum` lists, each after whether it is a boolean; None: others may come."""
    values = schema.get("enum") if isinstance(schema, dict) else None
    values = [schema["const"]] if isinstance(schema, dict) and "const" in schema else values
    if not isinstance(values, list) or any(isinstance(each, dict | list) for each in values):
        return None
    return [(isinstance(each, bool), each) for each in values]  # in Python, 1 == True


def _tags(schema: Any, name: str, root: Mapping[str, Any]) -> list[tuple[bool, Any]] | None:
    """Return the values that the property `name` may have if a value of a schema has it; None: not known."""
    if isinstance(schema, dict) and isinstance(schema.get("anyOf"), list):
        found = [_tags(each, name, root) for each in schema["anyOf"]]
        return None if None in found else [tag for each in found for tag in each or ()]
    if isinstance(schema, dict):  # `required` beside `$ref` excludes values and adds none
        schema = _followed({key: value for key, value in schema.items() if key != "required"}, root)
    if _types(schema) != ["object"] or not isinstance(schema.get("properties"), dict):
        return None
    return _values(_followed(schema["properties"].get(name), root))


# ---------------------------------------------------------------------- no other properties


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in which objects have no properties but those that are listed, by name or by pattern, unless
    the schema says more about others.

    A model that may add properties of its own does. llama.cpp and xgrammar read schemas in the same way.
    """
    # Schemas that are combined must stay open: each has properties that the others do not list. What matches one
    # alternative of `oneOf` might, if the others were closed, match these as they stand.
    combined = any(
        each.keys() & {"allOf", "oneOf"} or {"$ref", "properties"} <= each.keys()
        for each in objects_in(schema)
    )
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
    alternatives = [] if schema.keys() & {"required", *_LISTS} else ["anyOf"]
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
