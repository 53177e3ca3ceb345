"""Routes for whoever runs the server: is it well, what is it, what has it done."""

from __future__ import annotations

import importlib.metadata

import orjson
import torch
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from common.errors import EngineDeadError, ShuttingDownError
from common.server.errors import ApiError, from_exception
from common.server.metrics import Metrics
from common.server.page import PAGE_HEADERS
from common.server.service import service_of
from common.server.transport import EventStream, json_response
from kernels.dispatch import kernels_on

router = APIRouter()


@router.get("/", include_in_schema=False)
async def welcome(request: Request) -> Response:
    """What a person sees who opens the server's address."""
    return Response(service_of(request).page, headers=PAGE_HEADERS, media_type="text/html")


# Not in the schema: it never ends, and whoever tries out all that is in there would wait.
@router.get("/steps", include_in_schema=False)
async def steps(request: Request) -> Response:
    """The engine's steps as they come, for as long as somebody looks (`common.server.live_view`)."""
    service = service_of(request)
    if service.live_view is None:
        raise ApiError(
            404, "the live view is off: this server runs with --no-live-view", code="live_view_off"
        )
    viewer = service.live_view.open()
    return EventStream(
        viewer.events(),
        on_close=lambda _: viewer.close(),
        backlogs=service.backlogs,
        waits=True,
        ping_s=service.ping_s,
    )


@router.get("/health")
async def health(request: Request) -> Response:
    """Whether the server lives: one that does not should be started again."""
    service = service_of(request)
    service.require_health()
    paused = "paused" if service.engine.paused else "ok"
    status = "draining" if service.worker.draining else paused
    return json_response({"status": status, "phase": service.engine.phase.slug})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether new requests are taken: a server that does not take them should get none."""
    service = service_of(request)
    service.require_health()
    if service.worker.draining:
        raise from_exception(ShuttingDownError("draining: the server is shutting down"))
    return json_response({"status": "ok", "phase": service.engine.phase.slug})


@router.get("/version")
async def version(request: Request) -> Response:
    """What runs here."""
    engine = service_of(request).engine
    return json_response(
        {
            "version": importlib.metadata.version("infer-phases"),
            "phase": engine.phase.slug,
            "torch": torch.__version__,
            "device": str(engine.runner.model.device),
            "dtype": str(engine.runner.model.dtype).removeprefix("torch."),
            "kernels": kernels_on(engine.runner.model.device),
            "batch_invariant": engine.runner.model.batch_invariant,
        }
    )


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Free the blocks that the prefix cache keeps and no request uses; a phase without that cache frees none.

    The body is empty or `{}`, and must be sent as JSON: a page of another site cannot make a browser do that.

    Raises:
        ApiError: as `Bodies.read_json`; 400, the body has fields; 503, the engine is dead, or the server ends.
    """
    service = service_of(request)
    body = await service.bodies.read_json(request)
    try:
        has_fields = orjson.loads(body or b"{}") != {}
    except ValueError:
        has_fields = True
    if has_fields:
        raise ApiError(400, "this route takes no fields: send no body, or {}", code="unknown_field")
    try:
        dropped = await service.worker.reset_prefix_cache()
    except (EngineDeadError, ShuttingDownError) as error:
        raise from_exception(error) from None
    return json_response({"dropped_blocks": dropped})


@router.get("/metrics", include_in_schema=False)  # Prometheus knows its own format
async def metrics(request: Request) -> Response:
    """What has been counted, for Prometheus."""
    page, content_type = Metrics(service_of(request)).render()
    return Response(page, headers={"Content-Type": content_type})


@router.get("/telemetry")
async def telemetry(
    request: Request,
    since_step: int | None = Query(
        default=None, ge=0, lt=2**63, description="the page's first step; left out: the latest page"
    ),
) -> Response:
    """The engine's counters, and a page of its latest steps. Async, since a page is soon made: as many threads as
    there are readers would take turns with the engine's."""
    service = service_of(request)
    engine = service.engine
    return json_response(
        {
            "phase": engine.phase.slug,
            "max_batch_size": engine.config.max_batch_size,
            "max_seq_len": engine.max_seq_len,
            "queue_room": service.worker.queue_room(),
            **engine.telemetry.snapshot(since_step=since_step),
        }
    )
