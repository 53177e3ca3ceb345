"""The routes: text, tokens, models, the server's state, traces, and administration.

The routes that make text differ in the body they read and the wire format they write (`Route`); the rest is one
function, `generate`.
"""

from __future__ import annotations

import importlib.metadata
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import orjson
import torch
from fastapi import APIRouter, Depends, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from common.errors import ShuttingDownError
from common.request import SamplingParams
from common.server.bodies import check_model, refused
from common.server.errors import ApiError, from_exception, status_at
from common.server.live_view import TraceStream
from common.server.logs import log_departure, log_end, log_refusal
from common.server.metrics import Metrics, count_longest_choices
from common.server.middleware import client_of
from common.server.page import PAGE_HEADERS
from common.server.replies.answer import Answer, WireFormat, collect, stream_events
from common.server.replies.chat import ChatChunks
from common.server.replies.completions import CompletionChunks, NamedCompletionEvents
from common.server.replies.responses import ResponseEvents
from common.server.replies.shapes import (
    CacheReset,
    Health,
    ModelCard,
    ModelList,
    Ready,
    TelemetrySnapshot,
    Text,
    Tokens,
    Version,
    json_response,
)
from common.server.requests.chat import ChatRequest
from common.server.requests.completions import CompletionRequest
from common.server.requests.generation import GenerationRequest
from common.server.requests.responses import ResponsesRequest
from common.server.service import Service, service_of
from common.server.stream import CLIENT_LEFT, EventStream, StreamEnds, while_connected
from kernels.dispatch import kernels_on

router = APIRouter()

#: Argument of a route: the service of its app.
Served = Annotated[Service, Depends(service_of)]

RequestT = TypeVar("RequestT", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class Route(Generic[RequestT]):
    """The differences between the routes that make text.

    Attributes:
        body: the form of its body.
        wire: returns the writer of an answer, in the route's format.
        streams: returns whether a request wants a stream.
        id_prefix: the beginning of its answers' ids.
    """

    body: type[RequestT]
    wire: Callable[[Answer, RequestT], WireFormat]
    streams: Callable[[GenerationRequest, Request], bool]
    id_prefix: str


def streams_unless_json_is_asked_for(wanted: GenerationRequest, request: Request) -> bool:
    """Return `stream` if the body has it, or else True unless `Accept` names JSON and no event stream.

    OpenAI's clients always send `stream` when they stream, and accept JSON when they do not.
    """
    if wanted.stream is not None:
        return wanted.stream
    accepted = {
        part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")
    }
    return "application/json" not in accepted or "text/event-stream" in accepted


def streams_if_asked_to(wanted: GenerationRequest, _: Request) -> bool:
    """Return `stream`, false by default: OpenAI's rule.

    Raises:
        ApiError: 422, the body has `stream_options` but does not ask for a stream.
    """
    if not wanted.stream and wanted.stream_options is not None:
        raise refused("stream_options", 'only with "stream": true')
    return bool(wanted.stream)


COMPLETIONS = Route(CompletionRequest, NamedCompletionEvents, streams_unless_json_is_asked_for, "cmpl-")
STRICT_COMPLETIONS = Route(CompletionRequest, CompletionChunks, streams_if_asked_to, "cmpl-")
CHAT = Route(ChatRequest, ChatChunks, streams_if_asked_to, "chatcmpl-")
RESPONSES = Route(ResponsesRequest, ResponseEvents, lambda wanted, _: bool(wanted.stream), "resp_")


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Complete one prompt or several, as JSON or as an event stream."""
    return await generate(request, COMPLETIONS)


@router.post("/openai/v1/completions")
async def create_strict_completion(request: Request) -> Response:
    """Complete prompts to the letter of OpenAI: JSON unless a stream is asked for, plain chunks, its statuses."""
    return await generate(request, STRICT_COMPLETIONS)


@router.post("/v1/chat/completions")
@router.post("/openai/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, as JSON or, if asked to, as an event stream of OpenAI's chunks."""
    return await generate(request, CHAT)


@router.post("/v1/responses")
@router.post("/openai/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer a list of items, as one response or, if asked to, as an event stream. Nothing is stored."""
    return await generate(request, RESPONSES)


async def generate(request: Request, route: Route[RequestT]) -> Response:
    """Read a body, submit the request and answer with the engine's outputs."""
    # No argument of the route: FastAPI takes 70 function calls to pass one.
    service: Service = request.app.state.server
    client = client_of(request.scope)
    try:
        body = await service.bodies.read_json(request)
        arrived_s = time.monotonic()
        taken_in = take_in(service, request, route, body, arrived_s)
        wanted, streaming, answer = await while_connected(request.receive, taken_in)
    except ClientDisconnect:
        log_departure(client)
        raise
    except Exception as error:
        refusal = from_exception(error)
        log_refusal(refusal, status_at(request.url.path, refusal), error, client=client)
        raise refusal from None

    def close(client_gone: str | None) -> None:
        answer.cancel()
        count_longest_choices(service.worker.requests, answer)
        log_end(
            answer,
            asked_s=arrived_s,
            client=client,
            user=wanted.user,
            request_id=request.state.request_id if request.state.named else None,
            client_gone=client_gone,
        )

    wire = route.wire(answer, wanted)
    encoding = service.admission.encoding
    if streaming:
        return EventStream(
            stream_events(wire, encoding),
            on_close=close,
            backlogs=service.backlogs,
            ping_s=service.ping_s,
            ends=StreamEnds(wire),
        )
    client_gone = None
    try:
        whole = await while_connected(request.receive, collect(wire, encoding))
        return Response(whole, media_type="application/json")
    except ClientDisconnect:
        client_gone = CLIENT_LEFT
        raise
    finally:
        close(client_gone)


async def take_in(
    service: Service, request: Request, route: Route[RequestT], body: bytes, arrived_s: float
) -> tuple[RequestT, bool, Answer]:
    """Validate a body and submit its request. Returns the request, whether it wants a stream, and its answer."""
    wanted = await service.intake.parse(body, route.body)
    streaming = route.streams(wanted, request)
    # The answer's id is made from the request's unless the client chose that one: answers need unique ids.
    number = uuid.uuid4().hex if request.state.named else request.state.request_id
    answer_id = f"{route.id_prefix}{number}"
    streams = await service.intake.submit(wanted, answer_id, arrived_s)
    answer = Answer.to(
        wanted,
        answer_id,
        service.model_name,
        service.fingerprint,
        service.engine.tokenizer,
        streams,
        service.dialect,
    )
    try:
        answer.show_prompts(wanted)
    except Exception:
        answer.cancel()
        raise
    return wanted, streaming, answer


@router.post("/tokenize")
async def tokenize(request: Request, service: Served) -> Response:
    """Return the token ids of a text, or of a conversation as chat renders it."""
    body = await service.bodies.read_json(request)
    tokens, spelled = await while_connected(request.receive, service.intake.tokenize(body))
    reply: Tokens = {
        "count": len(tokens),
        "max_model_len": service.engine.max_seq_len,
        "tokens": tokens,
        "token_strs": spelled,
    }
    return json_response(reply)


@router.post("/detokenize")
async def detokenize(request: Request, service: Served) -> Response:
    """Return the text of token ids, special tokens included."""
    body = await service.bodies.read_json(request)
    reply: Text = {"prompt": await while_connected(request.receive, service.intake.detokenize(body))}
    return json_response(reply)


@router.get("/v1/models")
@router.get("/openai/v1/models")
async def list_models(service: Served) -> Response:
    """List the served model, once for each of its names."""
    cards = [model_card(service, name) for name in service.limits.models]
    reply: ModelList = {"object": "list", "data": cards}
    return json_response(reply)


@router.get("/v1/models/{model:path}")
@router.get("/openai/v1/models/{model:path}")
async def retrieve_model(service: Served, model: str) -> Response:
    """Return the served model, asked for by one of its names."""
    check_model(model, service.limits)
    return json_response(model_card(service, model))


def model_card(service: Service, name: str) -> ModelCard:
    """Return the served model's description under one of its names."""
    params = service.engine.default_params
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "infer",
        "max_model_len": service.engine.max_seq_len,
        "phase": service.engine.phase.slug,
        "sampling_defaults": {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
        },
        "sampling_defaults_from": "server" if params == SamplingParams() else "generation_config.json",
    }


@router.get("/", include_in_schema=False)
async def welcome(service: Served) -> Response:
    """Return the page that a browser shows at the server's address."""
    return Response(service.page, headers=PAGE_HEADERS, media_type="text/html")


# Not in the schema: the stream never ends, and a program that tries out every route of the schema would wait.
@router.get("/steps", include_in_schema=False)
async def steps(service: Served) -> Response:
    """Stream the engine's steps as they come, until the client leaves (`common.server.live_view`)."""
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
async def health(service: Served) -> Response:
    """Answer 200 while the server lives. A server that answers 503 should be started again."""
    service.require_health()
    reply: Health = {
        "status": "paused" if service.engine.paused else "ok",
        "phase": service.engine.phase.slug,
    }
    if service.worker.draining:
        reply["status"] = "draining"
    return json_response(reply)


@router.get("/ready")
async def ready(service: Served) -> Response:
    """Answer 200 while new requests are taken. A server that answers 503 should get none."""
    service.require_health()
    if service.worker.draining:
        raise ShuttingDownError("draining: the server is shutting down")
    reply: Ready = {"status": "ok", "phase": service.engine.phase.slug}
    return json_response(reply)


@router.get("/version")
async def version(service: Served) -> Response:
    """Return the versions and the device of this server."""
    engine = service.engine
    reply: Version = {
        "version": importlib.metadata.version("infer-phases"),
        "phase": engine.phase.slug,
        "torch": torch.__version__,
        "device": str(engine.runner.model.device),
        "dtype": str(engine.runner.model.dtype).removeprefix("torch."),
        "weights": str(engine.runner.model.weight_dtype).removeprefix("torch."),
        "kernels": kernels_on(engine.runner.model.device),
        "batch_invariant": engine.runner.model.batch_invariant,
    }
    return json_response(reply)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request, service: Served) -> Response:
    """Free the blocks that the prefix cache keeps and no request uses; a phase without that cache frees none.

    The body is empty or `{}`, and must be sent as JSON: a page of another site cannot make a browser do that.

    Raises:
        ApiError: as `Bodies.read_json`; 400, the body has fields.
        EngineDeadError, ShuttingDownError: nothing is taken any more.
    """
    body = await service.bodies.read_json(request)
    try:
        has_fields = orjson.loads(body or b"{}") != {}
    except ValueError:
        has_fields = True
    if has_fields:
        raise ApiError(400, "this route takes no fields: send no body, or {}", code="unknown_field")
    reply: CacheReset = {"dropped_blocks": await service.worker.reset_prefix_cache()}
    return json_response(reply)


@router.get("/metrics", include_in_schema=False)  # Prometheus knows its own format
async def metrics(service: Served) -> Response:
    """Return all metrics in Prometheus's format."""
    page, content_type = Metrics(service).render()
    return Response(page, headers={"Content-Type": content_type})


@router.get("/telemetry")
async def telemetry(
    service: Served,
    since_step: int | None = Query(
        default=None, ge=0, lt=2**63, description="the page's first step; left out: the latest page"
    ),
) -> Response:
    """Return the engine's counters and a page of its latest steps.

    Runs on the event loop: a page is soon made, and threads of many readers would take turns with the engine's.
    """
    engine = service.engine
    page = engine.telemetry.snapshot(since_step=since_step)
    reply: TelemetrySnapshot = {
        "phase": engine.phase.slug,
        "max_batch_size": engine.config.max_batch_size,
        "max_seq_len": engine.max_seq_len,
        "queue_room": service.worker.queue_room(),
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
    """Record the engine's next steps and stream the events. A client that leaves early lacks the last `]`."""
    recording = service.recordings.open(seconds)
    return TraceStream(
        recording.pieces(),
        on_close=lambda _: recording.close(),
        backlogs=service.backlogs,
        waits=True,
        ping_s=service.ping_s,
    )


#: Routes that act on everybody's requests: they exist with `--admin`, and where clients must send a key. They are
#: not in the OpenAPI document, which describes the routes that every server has.
admin_router = APIRouter(include_in_schema=False)


@admin_router.post("/pause")
async def pause(service: Served) -> Response:
    """Compute nothing more until `POST /resume`. Answers once the tokens of the steps in flight are delivered."""
    await service.worker.pause()
    return json_response({"status": "paused"})


@admin_router.post("/resume")
async def resume(service: Served) -> Response:
    """Compute again, first for the requests that were running; requests that came meanwhile are in the queue."""
    await service.worker.resume()
    return json_response({"status": "ok"})
