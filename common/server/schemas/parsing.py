"""Bytes to a checked body, or to one error that says what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from common.server.errors import ApiError, shorten

MAX_BODY_BYTES = 2 * 1024 * 1024

#: JSON values in a body, and lists and objects among them. The validator, which holds the interpreter's lock, takes
#: up to a tenth of a microsecond for a value and three microseconds for a list or an object.
MAX_VALUES = 2**18
MAX_CONTAINERS = 2**14

# Strict: "5" is not 5, and true is not 1. Unknown fields are refused by `_refuse_unknown`: pydantic's own refusal
# reports each of them, which takes seconds for two megabytes of them.
BODY = ConfigDict(
    strict=True, allow_inf_nan=False, extra="allow", json_schema_extra={"additionalProperties": False}
)

#: How the tags begin that alternatives of a field are told apart by. pydantic names them in an error's place, where
#: they mean nothing to a client.
TAG = "as "


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request can ask of this server."""

    models: tuple[str, ...]  # names of the one that is served; it calls itself by the first
    max_choices: int  # more would not fit an empty queue
    vocab_size: int


class Body(BaseModel):
    """A request's body. Null means the default, for all fields that have one."""

    model_config = BODY

    def check(self, limits: Limits) -> None:
        """Refuse what is well-formed and cannot be served.

        Raises:
            ApiError: 422.
        """


BodyT = TypeVar("BodyT", bound=Body)


def parse(body: bytes, form: type[BodyT], limits: Limits) -> BodyT:
    """Read and check a request's body.

    Raises:
        ApiError: 400 for what is not JSON, lacks a field, or has one of a wrong type; 422 for what is well-formed
            and cannot be served.
    """
    try:
        parsed = form.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None
    _refuse_unknown(parsed)
    parsed.check(limits)
    return parsed


def refuse_too_many_values(body: bytes) -> None:
    """Refuse a body whose validation would take too long, however few its bytes are.

    Counting takes milliseconds for two megabytes. Strings are cut out first: commas and brackets in them are text.

    Raises:
        ApiError: 413.
    """
    if body.count(b",") + body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:  # strings included
        return
    without_escapes = body.replace(rb"\\", b"").replace(rb"\"", b"")
    values = without_escapes.count(b'"') // 4  # at the least: a key and its text have two quotes each
    containers = 0
    if values <= MAX_VALUES:
        structure = b"".join(without_escapes.split(b'"')[::2])
        containers = structure.count(b"[") + structure.count(b"{")
        values = structure.count(b",") + containers
    if values > MAX_VALUES or containers > MAX_CONTAINERS:
        raise ApiError(
            413,
            f"the body holds more than {MAX_VALUES} values, or more than {MAX_CONTAINERS} lists and objects; "
            "send several smaller requests",
            code="body_too_complex",
        )


def check_model(model: str, limits: Limits) -> None:
    """Raise ApiError (404) if `model` is no name of the served model."""
    if model not in limits.models:
        raise ApiError(
            404,
            f"model {shorten(model, 100)!r} is not served here; this server has {limits.models[0]!r}",
            param="model",
            code="model_not_found",
        )


def refused(param: str, message: str) -> ApiError:
    """422: a value that cannot be served."""
    return ApiError(422, f"{param}: {message}", param=param, code="invalid_value")


def _refuse_unknown(body: BaseModel, prefix: str = "") -> None:
    """Unknown fields of a body and of the objects in it."""
    unknown = next(iter(body.model_extra or ()), None)
    if unknown is not None:
        name = prefix + shorten(unknown, 100)
        raise ApiError(422, f"{name}: unknown field", param=name, code="unknown_field")
    for name in body.model_fields_set:
        value = getattr(body, name, None)
        if isinstance(value, BaseModel):
            _refuse_unknown(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if not isinstance(item, BaseModel):  # a list of plain values: however long, it has no fields
                    break
                _refuse_unknown(item, f"{prefix}{name}[{number}].")


# ---------------------------------------------------------------------- what pydantic found, as an ApiError

#: The error of a field that is not implemented: its `param` is the field itself, wherever it stands.
NOT_IMPLEMENTED = "not_implemented"

_SYNTAX_ERRORS = frozenset({"json_invalid", "missing", "finite_number"})


def _explain(error: ValidationError) -> ApiError:
    """One answer for all that is wrong: the first syntax or type error, or else the first of any kind."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    worst = next((each for each in details if _is_syntax(each)), details[0])
    path = [part for part in worst["loc"] if not str(part).startswith(TAG)]
    where = "".join(f"[{part}]" if type(part) is int else f".{shorten(str(part), 100)}" for part in path)
    where = where.removeprefix(".")
    kind, message = worst["type"], worst["msg"]
    return ApiError(
        400 if _is_syntax(worst) else 422,
        f"{where}: {message}" if where else message,
        param=where if kind == NOT_IMPLEMENTED else str(path[0]) if path else None,
        code={"json_invalid": "invalid_json", "missing": "missing_field"}.get(
            kind, "invalid_type" if kind.endswith("_type") else "invalid_value"
        ),
    )


def _is_syntax(detail: ErrorDetails) -> bool:
    """Whether this is an error of form (400) rather than of value (422). An empty prompt, or a token id that no
    model has, counts as one of form."""
    kind = detail["type"]
    return kind in _SYNTAX_ERRORS or kind.endswith(("_type", "_parsing")) or detail["loc"][:1] == ("prompt",)
