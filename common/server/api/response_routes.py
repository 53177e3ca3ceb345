"""The routes under `/v1/responses`."""

from __future__ import annotations

from typing import Literal, get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from common.server.api.response_items import owner_of
from common.server.api.responses import (
    DeletedResponse,
    EventType,
    InputItems,
    ResponseEvent,
    ResponseEvents,
    ResponseObject,
    ResponsesRequest,
)
from common.server.api.shapes import InputTokens, json_response
from common.server.api.stream import while_connected
from common.server.openapi import OF_BODIES, OF_TEXT, answers, event_stream
from common.server.routes import JsonRoute, generate
from common.server.service import Served

router = APIRouter(route_class=JsonRoute)

_EVENTS = event_stream(ResponseEvent, get_args(EventType))


@router.post("/v1/responses", **answers(ResponseObject, OF_TEXT, events=_EVENTS))
@router.post("/openai/v1/responses", **answers(ResponseObject, OF_TEXT, events=_EVENTS, strict=True))
async def create_response(request: Request, service: Served, wanted: ResponsesRequest) -> Response:
    """Answer a text or a list of items, as one response or, if asked to, as an event stream."""
    return await generate(request, service, wanted, ResponseEvents, "resp_")


@router.get("/v1/responses/{response_id}", **answers(ResponseObject, [404]))
@router.get("/openai/v1/responses/{response_id}", **answers(ResponseObject, [404]))
async def retrieve_response(request: Request, service: Served, response_id: str) -> Response:
    """Return a stored response."""
    stored = service.stored.get(owner_of(request.headers), response_id)
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}", **answers(DeletedResponse, [404]))
@router.delete("/openai/v1/responses/{response_id}", **answers(DeletedResponse, [404]))
async def delete_response(request: Request, service: Served, response_id: str) -> Response:
    """Forget a stored response."""
    service.stored.remove(owner_of(request.headers), response_id)
    reply: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
    return json_response(reply)


@router.get("/v1/responses/{response_id}/input_items", **answers(InputItems, [404, 422]))
@router.get("/openai/v1/responses/{response_id}/input_items", **answers(InputItems, [400, 404]))
async def list_input_items(
    request: Request, service: Served, response_id: str, order: Literal["asc", "desc"] = "desc"
) -> Response:
    """Return the items that a stored response answers, those of earlier responses included."""
    items = service.stored.get(owner_of(request.headers), response_id).input_items(response_id)
    if order == "desc":
        items.reverse()
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
    reply: InputItems = {"object": "list", "data": items, "has_more": False, **ends}  # type: ignore[typeddict-item]
    return json_response(reply)


@router.post("/v1/responses/input_tokens", **answers(InputTokens, OF_BODIES))
@router.post("/openai/v1/responses/input_tokens", **answers(InputTokens, OF_BODIES, strict=True))
async def count_input_tokens(request: Request, service: Served, wanted: ResponsesRequest) -> Response:
    """Return the number of tokens of the prompt that the body of a response becomes."""
    tokens = await while_connected(request.receive, service.intake.count(wanted))
    reply: InputTokens = {"object": "response.input_tokens", "input_tokens": tokens}
    return json_response(reply)
