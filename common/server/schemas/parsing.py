"""Bytes to a checked body, or to one error that says what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from common.server.errors import ApiError, shorten

MAX_BODY_BYTES = 2 * 1024 * 1024

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


def check_model(model: str, limits: Limits, *, status: int = 422) -> None:
    """ApiError: it is no name of the served one."""
    if model not in limits.models:
        raise ApiError(
            status,
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
        param=str(path[0]) if path else None,
        code={"json_invalid": "invalid_json", "missing": "missing_field"}.get(
            kind, "invalid_type" if kind.endswith("_type") else "invalid_value"
        ),
    )


def _is_syntax(detail: ErrorDetails) -> bool:
    """Whether this is an error of form (400) rather than of value (422). An empty prompt, or a token id that no
    model has, counts as one of form."""
    kind = detail["type"]
    return kind in _SYNTAX_ERRORS or kind.endswith(("_type", "_parsing")) or detail["loc"][:1] == ("prompt",)
