"""Tables of options and request fields, read from the code that defines them."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from cluster.options import ClusterOptions
from common.server.api.bodies import HINTS, UNIMPLEMENTED
from common.server.api.chat import ChatRequest
from common.server.api.completions import CompletionRequest
from common.server.api.messages import MessagesRequest
from common.server.api.responses import ResponsesRequest
from common.server.api.wanted import GenerationRequest
from common.server.options import CommonOptions, ServerOptions, flag_of
from common.startup.phases import find_phase, phase_names
from docs.building.markdown import table

#: Attributes of a field's metadata (`annotated_types`), and how a page writes them.
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "max_length": "at most"}
PLURALS = {
    "integer": "integers",
    "text": "texts",
    "list of integers": "lists of integers",
    "object": "objects",
}


def options_table(*, phase: str | None = None) -> str:
    """Return a table of the options that a phase adds or changes.

    Args:
        phase: the name of the phase's package; None: the options that all phases share.
    """
    if phase is None:
        base = find_phase(phase_names()[0]).Config.__base__
        assert base is not None
        fields = {**base.model_fields, **ServerOptions.model_fields}
    else:
        config = find_phase(phase).Config
        own = config.__annotations__
        fields = {name: field for name, field in config.model_fields.items() if name in own}
    return fields_table(fields)


def cluster_options_table() -> str:
    """Return a table of the options of a cluster that a phase's own server does not have."""
    own = ClusterOptions.model_fields.keys() - CommonOptions.model_fields.keys()
    return fields_table({name: field for name, field in ClusterOptions.model_fields.items() if name in own})


def fields_table(
    fields: Mapping[str, FieldInfo], head: str = "option", written: Callable[[str], str] = flag_of
) -> str:
    """Return a table with a row for each field. `written` turns a field's name into the name that is shown."""
    rows = [
        [f"`{written(name)}`", _default(name, field), _escape(field.description), _values(field)]
        for name, field in fields.items()
    ]
    return table([head, "default", "meaning", "values"], rows, "llll")


BODIES = {
    "completions": CompletionRequest,
    "chat": ChatRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}


def request_fields_table(route: str) -> str:
    """Return a table of a route's fields. For routes other than `completions`, it leaves out the fields
    that all routes share."""
    body = BODIES[route]
    fields = dict(body.model_fields)
    if route != "completions":
        same = {(name, field.description) for name, field in GenerationRequest.model_fields.items()}
        fields = {name: field for name, field in fields.items() if (name, field.description) not in same}
    required_first = sorted(fields.items(), key=lambda item: not item[1].is_required())
    return fields_table(dict(required_first), "field", str)


def unimplemented_fields_table() -> str:
    """Return the table of request fields that are known and not implemented, with the values that are accepted."""
    rows = [
        [
            f"`{name}`",
            place,
            ", ".join(f"`{json.dumps(value)}`" for value in (None, *line.neutral)),
            _escape(line.reason),
        ]
        for place, lines in UNIMPLEMENTED.items()
        for name, line in lines.items()
    ]
    return table(["field", "in", "accepted at", "otherwise"], rows, "llll")


def hints_table() -> str:
    """Return the table of request fields that are accepted with any value and change nothing."""
    rows = [[place, ", ".join(f"`{name}`" for name in sorted(names))] for place, names in HINTS.items()]
    return table(["in", "fields"], rows, "ll")


def _default(name: str, field: FieldInfo) -> str:
    if name == "port":
        return "8000 + the phase's number"
    if field.is_required():
        return "required"
    if field.default_factory is not None:  # the default follows another option, which the description names
        return ""
    return "" if field.default in (None, "") else f"`{_json(field.default)}`"


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(field: FieldInfo) -> str:
    """Return the type and the bounds of a field, in words."""
    bounds = [
        f"{sign} {_bound(getattr(each, name))}"
        for each in field.metadata
        for name, sign in SIGNS.items()
        if getattr(each, name, None) is not None
    ]
    return _escape(", ".join([_type(field.annotation), *bounds]))


def _bound(value: float) -> str:
    if isinstance(value, int) and abs(value) >= 2**31:
        return f"{'-' if value < 0 else ''}2^{abs(value).bit_length() - 1}"
    return f"{value:g}"


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(each) for each in arguments if each is not type(None)))
    if origin is list:
        return f"list of {PLURALS.get(_type(arguments[0]), _type(arguments[0]))}"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, "object")


def _escape(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ")
