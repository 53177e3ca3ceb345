"""What the routes that take a JSON body share: reading it (`JsonRoute`), and answering with text (`generate`).

The routes themselves stand in `api`, in the files of their endpoints, and in `state`.
"""

from __future__ import annotations

import contextlib
import time
import typing
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from common.server.api.answer import Answer, WireFormat, collect, stream_events
from common.server.api.bodies import Body
from common.server.api.stream import EventStream, while_connected
from common.server.api.wanted import GenerationRequest
from common.server.errors import from_exception, status_at
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
                wanted = await read(request, service, form)
            answer: Response = await self.endpoint(request, service, wanted)
            return answer

        return handle


async def read(request: Request, service: Service, form: type[Body]) -> Body:
    """Read and validate a request's body as a `form`, and note its unknown fields.

    Sets `arrived_s` in the request's state: the time by which the body had come, on `time.monotonic`'s clock.

    Raises:
        ApiError: as `Bodies.read_json` and `Intake.parse`.
        ClientDisconnect: the client left.
    """
    body = await service.bodies.read_json(request)
    request.state.arrived_s = time.monotonic()
    wanted = await service.intake.parse(request, body, form)
    service.note_ignored(request, wanted)
    return wanted


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
