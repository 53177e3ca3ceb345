"""A trace of the engine's next steps, for as long as its reader likes (`common.trace`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from common.server.service import service_of
from common.server.transport import Stream

router = APIRouter()


class TraceStream(Stream):
    """A trace, as a file to be saved."""

    media_type = "application/json"
    headers_of_all: ClassVar[Mapping[str, str]] = {
        "Content-Disposition": 'attachment; filename="infer.trace"'
    }
    ping = b"\n"


# Not in the schema: a stream of a format of its own, which takes as long as one asks.
@router.get("/trace", include_in_schema=False)
async def trace(
    request: Request,
    seconds: float = Query(default=2.0, gt=0, le=3600, description="how long to record"),
) -> Response:
    """Record, and send the events as they come. A client that leaves early has a trace without its last `]`."""
    service = service_of(request)
    recording = service.recordings.open(seconds)
    return TraceStream(
        recording.pieces(),
        on_close=lambda _: recording.close(),
        backlogs=service.backlogs,
        waits=True,
        ping_s=service.ping_s,
    )
