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
from common.trace import TraceBuffer

router = APIRouter()

FETCH_S = 0.1  # how often what was recorded is sent
HEADERS = {"Cache-Control": "no-store", "Content-Disposition": 'attachment; filename="infer.trace"'}


# Not in the schema: a stream of a format of its own, which takes as long as one asks.
@router.get("/trace", include_in_schema=False)
async def trace(
    request: Request,
    seconds: float = Query(default=2.0, gt=0, le=3600, description="how long to record"),
) -> Response:
    """Record, and send what is recorded meanwhile. Who leaves early has a trace, too, whose array lacks its end."""
    service = service_of(request)
    if service.worker.draining:
        raise from_exception(ShuttingDownError("draining: the server is shutting down"))
    return StreamingResponse(_recorded(service, seconds), headers=HEADERS, media_type="application/json")


async def _recorded(service: Service, seconds: float) -> AsyncIterator[bytes]:
    worker, tracer, buffer = service.worker, service.tracer, TraceBuffer()
    clock = asyncio.get_running_loop().time
    try:
        await asyncio.wrap_future(worker.call(lambda _: tracer.start(buffer)))
        until_s = clock() + seconds
        while (left_s := until_s - clock()) > 0 and not buffer.closed and not worker.draining:
            await asyncio.sleep(min(left_s, FETCH_S))
            yield buffer.fetch()
    finally:
        # Also for one whose reader has left, whether or not it has begun: calls are made in order.
        stopped = worker.call(lambda _: tracer.stop(buffer))
    await asyncio.wrap_future(stopped)
    yield buffer.fetch()
