"""The routes that make no text: the model, the page, the server's state, traces, and control of the engine."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from common.engine.telemetry import PAGE_STEPS
from common.models.generation_config import Origin, origin_of
from common.server.api.bodies import check_model, read_json
from common.server.api.stream import EventStream
from common.server.errors import ApiError, json_response
from common.server.page.live_view import check_serves
from common.server.page.page import PAGE_HEADERS
from common.server.routes import answers
from common.server.service import Served, Service
from common.version import project_version

# ---------------------------------------------------------------------- the answers


class SamplingDefaults(TypedDict):
    temperature: float
    top_p: float
    top_k: Annotated[int | None, Field(description="null: all tokens")]
    min_p: float
    repetition_penalty: float


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: Annotated[
        int, Field(description="the most tokens of one request, prompt and answer together")
    ]
    phase: str
    sampling_defaults: Annotated[
        SamplingDefaults, Field(description="the sampling parameters of requests that name none")
    ]
    sampling_defaults_from: Annotated[
        Origin,
        Field(
            description="`infer fetch`: the recommendation in its catalogue of models. `server`: there is no "
            "suggestion, or `--generation-config none` ignores it"
        ),
    ]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Health(TypedDict):
    status: Literal["ok", "paused", "draining"]
    phase: str


class Version(TypedDict):
    version: str
    phase: str
    torch: str
    device: str
    dtype: Annotated[str, Field(description="type of activations, keys and values")]
    weights: Annotated[
        str,
        Field(description="type of the linear layers' weights; of weights in groups, the types in the file"),
    ]
    kernels: Annotated[
        Literal["triton", "native", "torch"],
        Field(description="the implementation of norms, attention and similar operations"),
    ]
    batch_invariant: Annotated[
        bool,
        Field(
            description="whether a sequence's logits have the same bits alone and beside any others: measured at "
            "start with native kernels and on a GPU, false otherwise"
        ),
    ]


class CacheReset(TypedDict):
    dropped_blocks: Annotated[int, Field(description="the dropped blocks, which no request used")]


class TelemetrySnapshot(TypedDict):
    """Counters since the start, and a page of steps: from `since_step` on, by default the latest page."""

    phase: str
    max_batch_size: int
    max_seq_len: int
    queue_room: Annotated[
        int,
        Field(
            description="the number of further requests that the queue can take before the server answers 503"
        ),
    ]
    counters: dict[str, float]
    steps: Annotated[list[dict[str, float]], Field(max_length=PAGE_STEPS)]
    next_step: Annotated[
        int,
        Field(
            description="`since_step` of the next page, which is there already if this is less than the steps "
            "counted"
        ),
    ]


# ---------------------------------------------------------------------- the routes

router = APIRouter()


@router.get("/v1/models", **answers(ModelList))
@router.get("/openai/v1/models", **answers(ModelList))
async def list_models(service: Served) -> Response:
    """List the served model, once for each of its names."""
    cards = [model_card(service, name) for name in service.limits.models]
    reply: ModelList = {"object": "list", "data": cards}
    return json_response(reply)


@router.get("/v1/models/{model:path}", **answers(ModelCard, [404]))
@router.get("/openai/v1/models/{model:path}", **answers(ModelCard, [404]))
async def retrieve_model(service: Served, model: str) -> Response:
    """Return the served model's description under the name in the path, which must be one of its names."""
    check_model(model, service.limits)
    return json_response(model_card(service, model))


def model_card(service: Service, name: str) -> ModelCard:
    """Return the served model's description under one of its names."""
    facts = service.engine.facts
    params, files = facts.default_params, facts.tokenizer_files
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "infer",
        "max_model_len": facts.max_seq_len,
        "phase": facts.phase.slug,
        "sampling_defaults": {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
        },
        "sampling_defaults_from": origin_of(
            params, facts.config.model, is_gguf=files is not None and files.is_file()
        ),
    }


@router.get("/", include_in_schema=False)
async def welcome(service: Served) -> Response:
    """Return the page that a browser shows at the server's address."""
    return Response(service.page, headers=PAGE_HEADERS, media_type="text/html")


# Not in the schema: the stream never ends, and a program that tries out every route of the schema would wait.
@router.get("/steps", include_in_schema=False)
async def steps(service: Served) -> Response:
    """Stream the engine's steps as they come (`live_view`), until the client leaves or the server shuts down.

    Raises:
        ApiError: 404, the live view is off; 503, too many clients watch, or the server shuts down.
    """
    if service.live_view is None:
        raise ApiError(
            404, "the live view is off: this server runs with --no-live-view", code="live_view_off"
        )
    live_view = service.live_view
    viewer = live_view.open()
    return EventStream(viewer.events(), on_close=lambda _: live_view.close(viewer))


@router.get("/health/", include_in_schema=False)
@router.get("/health", **answers(Health, [503]))
async def health(service: Served) -> Response:
    """Answer 200 unless the engine is dead or hung. A server that answers 503 should be started again."""
    service.require_health()
    reply: Health = {
        "status": "paused" if service.engine.paused else "ok",
        "phase": service.engine.facts.phase.slug,
    }
    if service.engine.draining:
        reply["status"] = "draining"
    return json_response(reply)


@router.get("/ready", **answers(Health, [503]))
async def ready(service: Served) -> Response:
    """Answer 200 unless the server shuts down, or its engine is dead or hung.

    A server that answers 503 should get no requests.
    """
    service.require_health()
    check_serves(service.engine)
    reply: Health = {"status": "ok", "phase": service.engine.facts.phase.slug}
    return json_response(reply)


@router.get("/version", **answers(Version))
async def version(service: Served) -> Response:
    """Return the versions, device and number types of this server."""
    engine = service.engine
    reply: Version = {
        "version": project_version(),
        "phase": engine.facts.phase.slug,
        "torch": importlib.metadata.version("torch"),
        "device": engine.facts.device,
        "dtype": engine.facts.dtype,
        "weights": engine.facts.weight_dtype,
        "kernels": engine.facts.kernels,
        "batch_invariant": engine.facts.batch_invariant,
    }
    return json_response(reply)


#: A body without fields, which may be left out.
_NO_FIELDS = {"type": "object", "additionalProperties": False}


@router.post(
    "/reset_prefix_cache",
    **answers(CacheReset, [400, 408, 413, 503]),
    openapi_extra={"requestBody": {"content": {"application/json": {"schema": _NO_FIELDS}}}},
)
async def reset_prefix_cache(request: Request, service: Served) -> Response:
    """Free the blocks that the prefix cache keeps and no request uses; a phase without that cache frees none.

    The body is empty or `{}`, and must be sent as JSON: a page of another site cannot make a browser do that.

    Raises:
        ApiError: as `read_json`; 400, the body is neither empty nor `{}`.
        EngineDeadError, ShuttingDownError: the engine takes no calls any more.
    """
    body = await read_json(request, service.body_timeout_s)
    if body.strip() not in (b"", b"{}"):
        raise ApiError(400, "this route takes no fields: send no body, or {}", code="unknown_field")
    reply: CacheReset = {"dropped_blocks": await service.engine.reset_prefix_cache()}
    return json_response(reply)


@router.get("/openai/metrics", include_in_schema=False)
@router.get("/metrics", include_in_schema=False)  # Prometheus knows its own format
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus's format."""
    page, content_type = request.app.state.metrics.render()
    return Response(page, headers={"Content-Type": content_type})


@router.get("/telemetry", **answers(TelemetrySnapshot, [400, 422]))
async def telemetry(
    service: Served,
    since_step: int | None = Query(
        default=None, ge=0, lt=2**63, description="the page's first step; left out: the latest page"
    ),
) -> Response:
    """Return the engine's counters and a page of its steps: the latest, or those from `since_step` on.

    Runs on the event loop: a page is made quickly, and threads for many readers would compete with the engine's.
    """
    engine = service.engine
    page = engine.telemetry.snapshot(since_step=since_step)
    reply: TelemetrySnapshot = {
        "phase": engine.facts.phase.slug,
        "max_batch_size": engine.facts.config.max_batch_size,
        "max_seq_len": engine.facts.max_seq_len,
        "queue_room": service.engine.queue_room(),
        "counters": page["counters"],
        "steps": page["steps"],
        "next_step": page["next_step"],
    }
    return json_response(reply)


# Not in the schema: the stream has a format of its own, and takes as long as its client asks.
@router.get("/trace", include_in_schema=False)
async def trace(
    service: Served, seconds: float = Query(default=2.0, gt=0, le=3600, description="how long to record")
) -> Response:
    """Record the engine's steps for some seconds, and stream them as a JSON list of trace events.

    If the client leaves early, or reads too slowly, its list lacks the final `]`.
    """
    service.recordings.check_room()
    return EventStream(
        service.recordings.record(seconds),
        ping=b"\n",  # white space between two values of the list
        media_type="application/json",
        headers={"Content-Disposition": 'attachment; filename="infer.trace"'},
    )


#: Routes that act on the requests of all clients: they exist with `--admin`. They are not in the OpenAPI
#: document, which describes the routes that every server has.
admin_router = APIRouter(include_in_schema=False)


@admin_router.post("/pause")
async def pause(service: Served) -> Response:
    """Stop computing until `POST /resume`. Answers once the tokens of the steps in flight are delivered."""
    await service.engine.pause()
    return json_response({"status": "paused"})


@admin_router.post("/resume")
async def resume(service: Served) -> Response:
    """Go on computing after `POST /pause`, first for the requests that were running.

    Requests that came during the pause are in the queue.
    """
    await service.engine.resume()
    return json_response({"status": "ok"})
