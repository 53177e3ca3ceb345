"""Random JSON Schemas of functions' parameters, with keywords that grammars support."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

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
