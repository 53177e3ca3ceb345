"""What FastAPI's OpenAPI document says of a route's answers, beside the types of the route's function.

FastAPI writes the document. It takes a route's body from its function's argument `wanted` (`routes.JsonRoute`), and
answers, errors and events from the arguments of the route's decorator, which `answers` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from common.server.api.bodies import MAX_BODY_BYTES
from common.server.errors import SHOULD_RETRY, ErrorResponse

_REASONS = {
    400: "Not JSON, a field missing or of a wrong type, an empty prompt, a token id that does not exist",
    404: "The name or id is not known here",
    408: "The body did not come in time",
    413: f"The body is over {MAX_BODY_BYTES} bytes, has too many values, or comes in too many pieces",
    415: "The body is compressed",
    422: "A value out of range, a field that is not implemented, a prompt too long for the server, "
    "a grammar that cannot be followed",
    500: "A failure of the server",
    503: "The queue is full, the server is shutting down, or its engine is dead",
    504: "The request took longer than the server gives one",
}
_NO_RETRY = {SHOULD_RETRY: {"description": "the same would happen again", "schema": {"const": "false"}}}
_HEADERS = {
    500: _NO_RETRY,
    503: {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}},
    504: _NO_RETRY,
}

#: Statuses of the errors of a route with a body, and of a route that makes text.
OF_BODIES = (400, 404, 408, 413, 415, 422, 500, 503)
OF_TEXT = (*OF_BODIES, 504)

#: The names of the components that describe the `data` of events begin with this. So they differ from FastAPI's.
_PREFIX = "Stream."

_event_types: dict[str, type[Any]] = {}  # by the name of its component


def answers(
    answer: type[Any],
    statuses: Sequence[int] = (),
    *,
    events: dict[str, Any] | None = None,
    strict: bool = False,
    error: type[Any] = ErrorResponse,
) -> dict[str, Any]:
    """Return the arguments of a route's decorator that describe its answers.

    Args:
        answer: the JSON answer.
        statuses: the statuses of errors, whose JSON is an `error`.
        events: the stream that may be the answer instead (`event_stream`).
        strict: the route answers 400 where others answer 422 (`errors.status_at`).
    """
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": error, "description": _REASONS[status], "headers": _HEADERS.get(status, {})}
        for status in statuses
        if not (strict and status == 422)
    }
    return {"response_model": answer, "responses": responses | ({200: {"content": events}} if events else {})}


def event_stream(data: type[Any], names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the description of a stream of server-sent events, whose `data` is JSON, except an error's.

    Without `names`, the events are unnamed, and the last one is `[DONE]`.
    """
    component = _PREFIX + data.__name__
    _event_types[component] = data
    json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_reference(component), _reference(ErrorResponse.__name__)]},
    }
    fields = (
        {"event": {"enum": list(names)}, "data": json}
        if names
        else {"data": {"anyOf": [json, {"const": "[DONE]"}]}}
    )
    event = {"type": "object", "required": list(fields), "properties": fields}
    return {"text/event-stream": {"itemSchema": event}}


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the app's OpenAPI document: FastAPI's, with the data of events, and without the answer 422 that
    FastAPI adds to each route with a parameter."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = FastAPI.openapi(app)
    schemas = document["components"]["schemas"]
    for component, data in _event_types.items():
        schema = TypeAdapter(data).json_schema(ref_template=f"#/components/schemas/{_PREFIX}{{model}}")
        schemas |= {_PREFIX + name: inner for name, inner in schema.pop("$defs", {}).items()}
        schemas[component] = schema
    for operations in document["paths"].values():
        for operation in operations.values():
            if operation["responses"].get("422", {}).get("description") == "Validation Error":
                del operation["responses"]["422"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _reference(component: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{component}"}
