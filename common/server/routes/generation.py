"""Routes that make text: what differs from one to the next is the body they read and the format they write."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from common.server.answers import collect, stream_events
from common.server.bodies import refused
from common.server.errors import from_exception, status_at
from common.server.logs import log_departure, log_end, log_refusal
from common.server.metrics import count_longest_choices
from common.server.middleware import client_of
from common.server.requests.chat import ChatRequest
from common.server.requests.generation import CompletionRequest, GenerationRequest, Shown
from common.server.service import Service, service_of
from common.server.stream_ends import StreamEnds
from common.server.transport import CLIENT_LEFT, EventStream, while_connected
from common.server.wire.chat import ChatChunks
from common.server.wire.format import Answer, Choice, MakeWireFormat, Prompt
from common.server.wire.named import NamedCompletionEvents
from common.server.wire.plain import CompletionChunks
from common.worker import RequestStream

router = APIRouter()

RequestT = TypeVar("RequestT", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class Route(Generic[RequestT]):
    """What is a route's own.

    Attributes:
        body: what it reads.
        wire: how it answers.
        streams: whether a request wants a stream.
        id_prefix: what the ids of its answers begin with.
    """

    body: type[RequestT]
    wire: MakeWireFormat
    streams: Callable[[GenerationRequest, Request], bool]
    id_prefix: str


def streams_unless_json_is_asked_for(wanted: GenerationRequest, request: Request) -> bool:
    """An explicit value wins. OpenAI's clients always say so when they stream and accept JSON when they do not."""
    if wanted.stream is not None:
        return wanted.stream
    accepted = {
        part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")
    }
    return "application/json" not in accepted or "text/event-stream" in accepted


def streams_if_asked_to(wanted: GenerationRequest, _: Request) -> bool:
    """OpenAI's rule.

    Raises:
        ApiError: options of a stream, and no stream.
    """
    if not wanted.stream and wanted.stream_options is not None:
        raise refused("stream_options", 'only with "stream": true')
    return bool(wanted.stream)


COMPLETIONS = Route(CompletionRequest, NamedCompletionEvents, streams_unless_json_is_asked_for, "cmpl")
STRICT_COMPLETIONS = Route(CompletionRequest, CompletionChunks, streams_if_asked_to, "cmpl")
CHAT = Route(ChatRequest, ChatChunks, streams_if_asked_to, "chatcmpl")


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Complete one prompt or several, as JSON or as an event stream."""
    return await generate(request, COMPLETIONS)


@router.post("/openai/v1/completions")
async def create_strict_completion(request: Request) -> Response:
    """The same to the letter of OpenAI: JSON unless a stream is asked for, plain chunks, its statuses."""
    return await generate(request, STRICT_COMPLETIONS)


@router.post("/v1/chat/completions")
@router.post("/openai/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, as JSON or, if asked to, as an event stream of OpenAI's chunks."""
    return await generate(request, CHAT)


async def generate(request: Request, route: Route[RequestT]) -> Response:
    """Read a body, submit the request and answer with the engine's outputs."""
    service = service_of(request)
    try:
        body = await service.bodies.read_json(request)
        arrived_s = time.monotonic()
        taken_in = take_in(service, request, route, body, arrived_s)
        wanted, streaming, answer, streams = await while_connected(request.receive, taken_in)
    except ClientDisconnect:
        log_departure(client_of(request.scope))
        raise
    except Exception as error:
        refusal = from_exception(error)
        log_refusal(refusal, status_at(request.url.path, refusal), error, client=client_of(request.scope))
        raise refusal from None

    def close(client_gone: str | None) -> None:
        cancel(streams)
        count_longest_choices(service.worker.requests, answer, streams)
        log_end(
            answer,
            streams,
            asked_s=arrived_s,
            client=client_of(request.scope),
            user=wanted.user,
            request_id=request.state.request_id if request.state.named else None,
            client_gone=client_gone,
        )

    options = wanted.stream_options
    wire = route.wire(
        answer,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )
    encoding = service.admission.encoding
    if streaming:
        return EventStream(
            stream_events(answer, streams, wire, encoding),
            on_close=close,
            backlogs=service.backlogs,
            ping_s=service.ping_s,
            ends=StreamEnds(answer, wire),
        )
    client_gone = None
    try:
        whole = await while_connected(request.receive, collect(answer, streams, wire, encoding))
        return Response(whole, media_type="application/json")
    except ClientDisconnect:
        client_gone = CLIENT_LEFT
        raise
    finally:
        close(client_gone)


async def take_in(
    service: Service, request: Request, route: Route[RequestT], body: bytes, arrived_s: float
) -> tuple[RequestT, bool, Answer, list[RequestStream]]:
    """Validate a body and submit its request.

    Returns:
        The request, whether it wants a stream, its answer, and the engine's streams, one for each choice.
    """
    wanted = await service.intake.parse(body, route.body)
    streaming = route.streams(wanted, request)
    answer = new_answer(service, wanted, f"{route.id_prefix}-{answer_number(request)}")
    streams = await service.intake.submit(wanted, answer.id, arrived_s)
    try:
        show_prompts(answer, wanted, streams)
    except Exception:
        cancel(streams)
        raise
    return wanted, streaming, answer, streams


def answer_number(request: Request) -> str:
    """Unlike any other, whatever the client calls its request; the request's own id where that was made up here."""
    made_up: str = uuid.uuid4().hex if request.state.named else request.state.request_id
    return made_up


def new_answer(service: Service, wanted: GenerationRequest, answer_id: str) -> Answer:
    prompts = [Prompt() for _ in range(wanted.num_prompts)]
    per_prompt = wanted.choices_per_prompt
    return Answer(
        id=answer_id,
        created=int(time.time()),
        model=service.model_name,
        tokenizer=service.engine.tokenizer,
        choices=[
            Choice(number * per_prompt + j, prompt, scores_prompt=j == 0)
            for number, prompt in enumerate(prompts)
            for j in range(per_prompt)
        ],
        shown=wanted.shown,
    )


def show_prompts(answer: Answer, wanted: GenerationRequest, streams: Sequence[RequestStream]) -> None:
    """Fill in each prompt's token ids and echoed text, if the request asked for them."""
    if answer.shown == Shown():
        return
    sent = wanted.prompts(None) if answer.shown.echo else ()
    for choice, stream in zip(answer.choices, streams, strict=True):
        prompt = choice.prompt
        if prompt.token_ids:  # filled in for an earlier choice
            continue
        prompt.token_ids = stream.request.prompt_token_ids
        if answer.shown.echo:
            text = sent[choice.index // wanted.choices_per_prompt]
            as_sent = isinstance(text, str) and wanted.truncate_prompt_tokens is None
            prompt.echo = str(text) if as_sent else answer.tokenizer.decode(prompt.token_ids)


def cancel(streams: Iterable[RequestStream]) -> None:
    """Give up what is not finished. Harmless for the rest."""
    for stream in streams:
        stream.cancel()
