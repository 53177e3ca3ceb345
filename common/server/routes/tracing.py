"""A trace of what the engine does from now on, for as long as its reader likes (`common.trace`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from common.errors import ShuttingDownError
from common.server.errors import from_exception
from common.server.service import Service, service_of
from common.trace import Recording, TraceBuffer

router = APIRouter()

FETCH_S = 0.1  # how often what was recorded is sent
HEADERS = {"Cache-Control": "no-store", "Content-Disposition": 'attachment; filename="infer.trace"'}


@router.get(
    "/trace", include_in_schema=False
)  # a stream of a format of its own, which takes as long as one asks
async def trace(
    request: Request,
    seconds: float = Query(default=2.0, gt=0, le=3600, description="how long to record"),
) -> Response:
    """Record, and send what is recorded meanwhile. Who leaves early has a trace, too, whose array lacks its end."""
    service = service_of(request)
    buffer = TraceBuffer()
    try:
        recording = await asyncio.wrap_future(service.worker.call(lambda _: service.tracer.start(buffer)))
    except ShuttingDownError as error:
        raise from_exception(error) from None
    return StreamingResponse(
        _fetched(service, buffer, recording, seconds), headers=HEADERS, media_type="application/json"
    )


async def _fetched(
    service: Service, buffer: TraceBuffer, recording: Recording, seconds: float
) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    until_s = clock() + seconds
    worker = service.worker
    try:
        while (left_s := until_s - clock()) > 0 and not buffer.closed and not worker.draining:
            await asyncio.sleep(min(left_s, FETCH_S))
            yield buffer.fetch()
    finally:
        stopped = worker.call(lambda _: service.tracer.stop(recording))  # also for one whose reader has left
    await asyncio.wrap_future(stopped)
    yield buffer.fetch()
