"""Routes that act on everybody's requests: they exist with `--admin`, and where clients must send a key."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from common.errors import EngineDeadError, ShuttingDownError
from common.server.errors import from_exception
from common.server.service import service_of
from common.server.transport import json_response

# Not in the schema, which describes what every server has.
router = APIRouter(include_in_schema=False)


@router.post("/pause")
async def pause(request: Request) -> Response:
    """Compute nothing more until `POST /resume`. Answers once the tokens of the steps in flight are delivered."""
    try:
        await service_of(request).worker.pause()
    except (EngineDeadError, ShuttingDownError) as error:
        raise from_exception(error) from None
    return json_response({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Compute again, first for the requests that were running; requests that came meanwhile are in the queue."""
    try:
        await service_of(request).worker.resume()
    except (EngineDeadError, ShuttingDownError) as error:
        raise from_exception(error) from None
    return json_response({"status": "ok"})
