"""What routes share: reading a JSON body (`JsonRoute`), answering with text (`generate`), and the description of
answers in the OpenAPI document (`answers`).

The routes themselves stand in `api`, in the files of their endpoints, and in `state`.
"""

from __future__ import annotations

import contextlib
import time
import typing
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from common.server.api.answer import Answer, WireFormat, collect, stream_events
from common.server.api.bodies import MAX_BODY_BYTES, Body, read_json
from common.server.api.stream import EventStream, while_connected
from common.server.api.wanted import GenerationRequest
from common.server.errors import SHOULD_RETRY, ErrorResponse, from_exception, json_response, status_at
from common.server.http.middleware import client_of
from common.server.logs import log_departure, log_end, log_refusal
from common.server.metrics import count_choices
from common.server.service import Service

RequestT = TypeVar("RequestT", bound=GenerationRequest)


class JsonRoute(APIRoute):
    """A route whose function gets the request, the service and the request's body, as its argument `wanted`.

    FastAPI documents the body by the argument's type. It does not read it: the body is read and validated within
    this server's bounds (`bodies`, `intake`). A function without this argument is called by FastAPI.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        form: type[Body] | None = typing.get_type_hints(self.endpoint).get("wanted")
        if form is None:
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            service: Service = request.app.state.server
            with refusals_logged(request):
                body = await read_json(request, service.body_timeout_s)
                request.state.arrived_s = time.monotonic()
                wanted = await service.intake.parse(request, body, form)
            service.note_ignored(request, wanted)
            answer: Response = await self.endpoint(request, service, wanted)
            return answer

        return handle


@contextlib.contextmanager
def refusals_logged(request: Request) -> Iterator[None]:
    """Context manager: log that a request is refused, or that its client left. Errors become an ApiError."""
    client, request_id = client_of(request.scope), request.state.request_id
    try:
        yield
    except ClientDisconnect:
        log_departure(client, request_id)
        raise
    except Exception as error:
        refusal = from_exception(error)
        status = status_at(request.url.path, refusal)
        log_refusal(refusal, status, error, client=client, request_id=request_id)
        raise refusal from None


async def generate(
    request: Request,
    service: Service,
    wanted: RequestT,
    wire_format: Callable[[Answer, RequestT], WireFormat],
    id_prefix: str,
) -> Response:
    """Submit a request, and answer with the engine's outputs: as a stream if `wanted.stream` is true.

    `wire_format` returns the object that writes an answer, whose id begins with `id_prefix`.
    """
    # The request's id becomes part of the answer's, unless the client chose it: answers need unique ids.
    number = uuid.uuid4().hex if request.state.named else request.state.request_id
    answer_id = f"{id_prefix}{service.id_tag}{number}"
    arrived_s: float = request.state.arrived_s
    with refusals_logged(request):
        answer = await while_connected(request.receive, _submit(service, wanted, answer_id, arrived_s))

    def close(client_left: bool) -> None:
        answer.cancel()
        count_choices(service.engine.requests, answer)
        log_end(
            answer,
            asked_s=arrived_s,
            client=client_of(request.scope),
            user=wanted.user,
            request_id=request.state.request_id if request.state.named else None,
            client_left=client_left,
        )

    wire = wire_format(answer, wanted)
    encoding = service.admission.encoding
    if wanted.stream:
        return EventStream(stream_events(wire, encoding), on_close=close, ping=wire.ping, lost=wire.lost)
    client_left = False
    try:
        whole = await while_connected(request.receive, collect(wire, encoding))
        return Response(whole, media_type="application/json")
    except ClientDisconnect:
        client_left = True
        raise
    finally:
        close(client_left)


async def convert(request: Request, service: Service, work: Callable[[], object]) -> Response:
    """Run `work` in the lane `converting`, and answer with its result as JSON."""
    return json_response(await while_connected(request.receive, service.admission.converting.run(work)))


async def _submit(service: Service, wanted: GenerationRequest, answer_id: str, arrived_s: float) -> Answer:
    """Submit a request to the engine. Returns its answer, which has no outputs yet."""
    streams = await service.intake.submit(wanted, answer_id, arrived_s)
    try:
        return Answer(
            wanted,
            answer_id,
            streams,
            tokenizer=service.engine.maker.tokenizer,
            dialect=service.dialect,
            model=service.model_name,
            fingerprint=service.fingerprint,
        )
    except Exception:
        for stream in streams:
            stream.cancel()
        raise


# ---------------------------------------------------------------------- the OpenAPI document

# FastAPI writes the document. It takes a route's body from its function's argument `wanted`, and answers, errors
# and events from the arguments of the route's decorator, which `answers` returns.

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
