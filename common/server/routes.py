"""The routes that make text and tokens. The others are in `state_routes`.

The routes that make text differ in the body they read and the wire format they write (`Route`). They share one
function, `generate`.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from common.server.api.answer import Answer, WireFormat, collect, stream_events
from common.server.api.bodies import BodyT
from common.server.api.chat import ChatRequest
from common.server.api.chat_answers import ChatChunks
from common.server.api.completion_answers import CompletionChunks, NamedCompletionEvents
from common.server.api.completions import CompletionRequest
from common.server.api.response_items import owner_of
from common.server.api.responses import DeletedResponse, InputItems, ResponseEvents, ResponsesRequest
from common.server.api.shapes import InputTokens, Text, Tokens, json_response
from common.server.api.stream import EventStream, StreamEnds, while_connected
from common.server.api.tokens import DetokenizeRequest, TokenizeRequest
from common.server.api.wanted import GenerationRequest
from common.server.errors import from_exception, status_at
from common.server.http.middleware import client_of
from common.server.logs import log_departure, log_end, log_refusal
from common.server.metrics import count_choices
from common.server.service import Served, Service

router = APIRouter()

RequestT = TypeVar("RequestT", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class Route(Generic[RequestT]):
    """The differences between the routes that make text.

    Attributes:
        body: the class that a request's body is validated as.
        wire: returns the object that writes an answer in the route's format.
        streams: returns whether a request is answered with an event stream instead of JSON.
        id_prefix: the beginning of the ids of the route's answers.
        prepare: completes a validated body before it is checked; None: it is complete.
    """

    body: type[RequestT]
    wire: Callable[[Answer, RequestT], WireFormat]
    streams: Callable[[GenerationRequest, Request], bool]
    id_prefix: str
    prepare: Callable[[Request, RequestT], None] | None = None


def streams_unless_json_is_asked_for(wanted: GenerationRequest, request: Request) -> bool:
    """Return the field `stream` if the body has it, or else True unless `Accept` names JSON and no event stream.

    OpenAI's clients always send `stream` when they stream, and accept JSON when they do not.
    """
    if wanted.stream is not None:
        return wanted.stream
    accepted = {
        part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")
    }
    return "application/json" not in accepted or "text/event-stream" in accepted


def streams_if_asked_to(wanted: GenerationRequest, _: Request) -> bool:
    """Return the field `stream`, or False if the body leaves it out: OpenAI's rule."""
    return bool(wanted.stream)


COMPLETIONS = Route(CompletionRequest, NamedCompletionEvents, streams_unless_json_is_asked_for, "cmpl-")
STRICT_COMPLETIONS = Route(CompletionRequest, CompletionChunks, streams_if_asked_to, "cmpl-")
CHAT = Route(ChatRequest, ChatChunks, streams_if_asked_to, "chatcmpl-")


def recall(request: Request, wanted: ResponsesRequest) -> None:
    """Fetch the stored items that the body of a response refers to."""
    service: Service = request.app.state.server
    wanted.recall(service.stored, owner_of(request.headers))


RESPONSES = Route(ResponsesRequest, ResponseEvents, streams_if_asked_to, "resp_", recall)


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Complete one prompt or several, as JSON or as an event stream."""
    return await generate(request, COMPLETIONS)


@router.post("/openai/v1/completions")
async def create_strict_completion(request: Request) -> Response:
    """Complete prompts exactly as OpenAI does: JSON or, if asked to, unnamed chunks; with OpenAI's statuses."""
    return await generate(request, STRICT_COMPLETIONS)


@router.post("/v1/chat/completions")
@router.post("/openai/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, as JSON or, if asked to, as an event stream of OpenAI's chunks."""
    return await generate(request, CHAT)


@router.post("/v1/responses")
@router.post("/openai/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer a text or a list of items, as one response or, if asked to, as an event stream."""
    return await generate(request, RESPONSES)


@router.get("/v1/responses/{response_id}")
@router.get("/openai/v1/responses/{response_id}")
async def retrieve_response(request: Request, service: Served, response_id: str) -> Response:
    """Return a stored response."""
    stored = service.stored.get(owner_of(request.headers), response_id)
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
@router.delete("/openai/v1/responses/{response_id}")
async def delete_response(request: Request, service: Served, response_id: str) -> Response:
    """Forget a stored response."""
    service.stored.remove(owner_of(request.headers), response_id)
    reply: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
    return json_response(reply)


@router.get("/v1/responses/{response_id}/input_items")
@router.get("/openai/v1/responses/{response_id}/input_items")
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


async def generate(request: Request, route: Route[RequestT]) -> Response:
    """Read a body, submit the request and answer with the engine's outputs."""
    # Not an argument of the route: FastAPI makes 70 function calls to pass one.
    service: Service = request.app.state.server
    client = client_of(request.scope)
    try:
        body = await service.bodies.read_json(request)
        arrived_s = time.monotonic()
        taken_in = take_in(service, request, route, body, arrived_s)
        wanted, streaming, answer = await while_connected(request.receive, taken_in)
    except ClientDisconnect:
        log_departure(client, request.state.request_id)
        raise
    except Exception as error:
        refusal = from_exception(error)
        status = status_at(request.url.path, refusal)
        log_refusal(refusal, status, error, client=client, request_id=request.state.request_id)
        raise refusal from None

    def close(client_left: bool) -> None:
        answer.cancel()
        count_choices(service.worker.requests, answer)
        log_end(
            answer,
            asked_s=arrived_s,
            client=client,
            user=wanted.user,
            request_id=request.state.request_id if request.state.named else None,
            client_left=client_left,
        )

    wire = route.wire(answer, wanted)
    encoding = service.admission.encoding
    if streaming:
        return EventStream(
            stream_events(wire, encoding),
            on_close=close,
            ping=wire.ping,
            ping_s=service.ping_s,
            ends=StreamEnds(wire),
        )
    client_left = False
    try:
        whole = await while_connected(request.receive, collect(wire, encoding))
        return Response(whole, media_type="application/json")
    except ClientDisconnect:
        client_left = True
        raise
    finally:
        close(client_left)


async def read_body(
    request: Request,
    service: Service,
    form: type[BodyT],
    prepare: Callable[[BodyT], None] | None = None,
) -> BodyT:
    """Read and validate a body as a `form`, and note its unknown fields. `prepare`: see `Intake.parse`.

    Raises:
        ApiError: as `Bodies.read_json` and `Intake.parse`.
    """
    body = await service.bodies.read_json(request)
    wanted = await while_connected(request.receive, service.intake.parse(body, form, prepare))
    service.note_ignored(request, wanted)
    return wanted


async def take_in(
    service: Service, request: Request, route: Route[RequestT], body: bytes, arrived_s: float
) -> tuple[RequestT, bool, Answer]:
    """Validate a body and submit its request.

    Returns the validated request, whether it is answered with a stream, and its answer without any output yet.
    `arrived_s` is the time by which the body had come, on `time.monotonic`'s clock.
    """
    prepare = None if route.prepare is None else functools.partial(route.prepare, request)
    wanted = await service.intake.parse(body, route.body, prepare)
    service.note_ignored(request, wanted)
    streaming = route.streams(wanted, request)
    # The request's id becomes part of the answer's, unless the client chose it: answers need unique ids.
    number = uuid.uuid4().hex if request.state.named else request.state.request_id
    answer_id = f"{route.id_prefix}{service.id_tag}{number}"
    streams = await service.intake.submit(wanted, answer_id, arrived_s)
    try:
        answer = Answer(
            wanted,
            answer_id,
            streams,
            tokenizer=service.engine.tokenizer,
            dialect=service.dialect,
            model=service.model_name,
            fingerprint=service.fingerprint,
        )
    except Exception:
        for stream in streams:
            stream.cancel()
        raise
    return wanted, streaming, answer


@router.post("/v1/responses/input_tokens")
@router.post("/openai/v1/responses/input_tokens")
async def count_input_tokens(request: Request, service: Served) -> Response:
    """Return the number of tokens of the prompt that the body of a response becomes."""
    prepare = functools.partial(recall, request)
    wanted = await read_body(request, service, ResponsesRequest, prepare)
    tokens = await while_connected(request.receive, service.intake.count(wanted))
    reply: InputTokens = {"object": "response.input_tokens", "input_tokens": tokens}
    return json_response(reply)


@router.post("/apply-template")
async def apply_template(request: Request, service: Served) -> Response:
    """Return the text that the body of a chat becomes, as llama.cpp's route of this name does."""
    wanted = await read_body(request, service, ChatRequest)
    reply: Text = {"prompt": await while_connected(request.receive, service.intake.render(wanted))}
    return json_response(reply)


@router.post("/tokenize")
async def tokenize(request: Request, service: Served) -> Response:
    """Return the token ids of a text, or of a conversation as chat renders it."""
    wanted = await read_body(request, service, TokenizeRequest)
    tokens, spelled = await while_connected(request.receive, service.intake.tokenize(wanted))
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
    wanted = await read_body(request, service, DetokenizeRequest)
    reply: Text = {"prompt": await while_connected(request.receive, service.intake.detokenize(wanted))}
    return json_response(reply)
