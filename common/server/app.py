"""The HTTP routes: the same for every phase. `create_app` puts them around an engine.

```text
POST /v1/completions
  body under 2 MB ─> checked ─> places in the queue ─> tokenized (threads) ─> engine's thread
                      400, 422     503                  400, 422                     │
                                                     JSON or event stream <── outputs ┘
```
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import torch
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from common.engine import Engine
from common.errors import EngineDeadError, InvalidGrammarError, ShuttingDownError
from common.request import Request as EngineRequest
from common.request import StepOutput
from common.server.errors import ApiError, from_exception, internal_error
from common.server.openapi import openapi_document
from common.server.page import PAGE_HEADERS, render_page
from common.server.request_log import log_departure, log_end, log_refusal
from common.server.schemas import MAX_BODY_BYTES, CompletionRequest, Limits, parse_completion_request
from common.server.sse import (
    CLIENT_LEFT,
    OPENAI_FINISH_REASONS,
    Answer,
    Choice,
    EventStream,
    NamedCompletionEvents,
    WireFormat,
    interleave,
    while_connected,
)
from common.worker import EngineWorker, RequestStream
from kernels.dispatch import kernels_on

router = APIRouter()

LAST_STEP_S = 5.0  # how long the end waits for a step whose clients have all been answered

#: Requests that are tokenized at the same time. With one, a prompt of two megabytes would hold up every short one
#: for a second; with more, many such prompts would take the cores that the engine computes on.
TOKENIZING_THREADS = 2

#: Requests whose grammars are compiled at the same time: a slow one holds up its like alone.
COMPILING_THREADS = 1


def create_app(
    engine: Engine,
    *,
    worker: EngineWorker | None = None,
    model_name: str | None = None,
    ping_s: float = 15.0,
    send_timeout_s: float = 60.0,
) -> FastAPI:
    """The app around an engine, which it owns from start-up to shutdown.

    Args:
        engine: of any phase.
        worker: whose thread built the engine; by default a new one, which takes the engine as it is.
        model_name: what clients call the model; by default the name it was loaded by (a folder's last part).
        ping_s: seconds between comments in a quiet stream.
        send_timeout_s: a client that takes nothing of its stream for so long is dropped.
    """
    server = CompletionServer(
        engine,
        worker or EngineWorker(lambda: engine),
        model_name or served_model_name(engine.config.model),
    )
    server.ping_s, server.send_timeout_s = ping_s, send_timeout_s

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.worker.start()
        yield
        # Not in a `finally`: who cancels this is in a hurry, and a pass may be long.
        await server.worker.stop(LAST_STEP_S)

    app = FastAPI(
        title=f"infer: {engine.phase.title.lower()}",
        summary=engine.phase.idea,
        version=importlib.metadata.version("infer-phases"),
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={
            ApiError: answer_api_error,
            HTTPException: answer_http_error,
            RequestValidationError: answer_invalid_query,
            ClientDisconnect: answer_nobody,
            Exception: answer_unexpected_error,
        },
    )
    app.state.server = server
    app.include_router(router)
    app.openapi = lambda: openapi_document(app, engine, server.model_name)  # type: ignore[method-assign]  # FastAPI's way to extend it
    return app


def served_model_name(model: str) -> str:
    """A checkpoint's folder stays ours; its last part is name enough."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


# ---------------------------------------------------------------------- completions


class CompletionServer:
    """What the routes need: the engine, its worker, and the steps from a body to streams of outputs."""

    def __init__(self, engine: Engine, worker: EngineWorker, model_name: str) -> None:
        self.engine = engine
        self.worker = worker
        self.model_name = model_name
        self.created = int(time.time())
        self.limits = Limits(model=model_name, max_choices=engine.config.max_waiting_requests)
        self.page = render_page(engine, model_name)
        self.ping_s = 15.0
        self.send_timeout_s = 60.0
        self._tokenizing = ThreadPoolExecutor(TOKENIZING_THREADS, thread_name_prefix="tokenizing")
        self._compiling = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="compiling")

    async def submit(self, completion: CompletionRequest, answer_id: str) -> list[RequestStream]:
        """Hand every choice to the engine, or none: their streams, by index.

        Places in the queue are held while the request waits for its turn to be tokenized, and given back if this is
        cancelled.

        Raises:
            QueueFullError, ShuttingDownError, EngineDeadError: nothing was tokenized.
            InvalidRequestError: nothing was submitted.
        """
        choices = len(completion.prompts) * completion.choices_per_prompt
        with self.worker.hold_places(choices) as places:
            loop = asyncio.get_running_loop()
            threads = self._compiling if completion.constrained else self._tokenizing
            making = loop.run_in_executor(threads, self._make_requests, completion, answer_id)
            return places.submit(await making)

    def _make_requests(self, completion: CompletionRequest, answer_id: str) -> list[EngineRequest]:
        params = [completion.sampling_params(choice) for choice in range(completion.choices_per_prompt)]
        requests: list[EngineRequest] = []
        try:
            for prompt in completion.prompts:
                for each in params:
                    request_id = f"{answer_id}-{len(requests)}"
                    request = self.engine.create_request(
                        prompt, each, request_id, cache_salt=completion.cache_salt or ""
                    )
                    requests.append(request)
                    prompt = request.prompt_token_ids  # tokenized once
        except InvalidGrammarError as error:
            assert completion.named_grammar is not None
            name, _ = completion.named_grammar
            raise InvalidGrammarError(f"{name}: {error}", param=name) from None
        return requests

    def new_answer(self, completion: CompletionRequest) -> Answer:
        per_prompt = completion.choices_per_prompt
        choices = len(completion.prompts) * per_prompt
        return Answer(
            id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.model_name,
            tokenizer=self.engine.tokenizer,
            choices=[Choice(index, prompt_index=index // per_prompt) for index in range(choices)],
        )


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Complete one prompt or several, as JSON or as an event stream."""
    server: CompletionServer = request.app.state.server
    try:
        require_json(request)
        body = await read_body(request)
        asked_s = time.monotonic()
        completion = parse_completion_request(body, server.limits)
        answer = server.new_answer(completion)
        streams = await while_connected(request.receive, server.submit(completion, answer.id))
    except ClientDisconnect:
        log_departure()
        raise
    except Exception as error:
        refusal = from_exception(error)
        log_refusal(refusal, error)
        raise refusal from None

    def close(client_gone: str | None) -> None:
        cancel(streams)
        log_end(answer, streams, asked_s=asked_s, user=completion.user, client_gone=client_gone)

    if wants_stream(completion, request):
        options = completion.stream_options
        wire = NamedCompletionEvents(
            answer,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
        )
        return EventStream(
            stream_events(answer, streams, wire),
            on_close=close,
            ping_s=server.ping_s,
            send_timeout_s=server.send_timeout_s,
        )
    client_gone = None
    try:
        return json_response(await while_connected(request.receive, collect(answer, streams)))
    except ClientDisconnect:
        client_gone = CLIENT_LEFT
        raise
    finally:
        close(client_gone)


async def stream_events(
    answer: Answer, streams: Sequence[RequestStream], wire: WireFormat
) -> AsyncIterator[bytes]:
    """Every choice's outputs as they come, in a wire format."""
    async with contextlib.aclosing(interleave(streams)) as outputs:
        async for index, output in outputs:
            yield wire.events(answer.choices[index], output)
    closing = wire.closing()
    if closing:
        yield closing


async def collect(answer: Answer, streams: Sequence[RequestStream]) -> dict[str, Any]:
    """Every choice to its end: the JSON answer.

    Raises:
        ApiError: a choice failed, and the answer with it.
    """
    logprobs: list[list[dict[str, list[Any]]]] = [[] for _ in streams]
    last: dict[int, StepOutput] = {}
    async with contextlib.aclosing(interleave(streams)) as outputs:
        async for index, output in outputs:
            if output.error is not None:
                raise from_exception(output.error)
            choice = answer.choices[index]
            token_logprobs = answer.logprobs(choice, output)
            if token_logprobs is not None:
                logprobs[index].append(token_logprobs)
            choice.add(output)
            last[index] = output
    reasons = [last[choice.index].finish_reason or "cancelled" for choice in answer.choices]
    return answer.header() | {
        "choices": [
            {
                "index": choice.index,
                "text": "".join(choice.text),
                "logprobs": join_logprobs(logprobs[choice.index]),
                "finish_reason": OPENAI_FINISH_REASONS[reason],
            }
            for choice, reason in zip(answer.choices, reasons, strict=True)
        ],
        "finish_reason": reasons[0],
        "usage": answer.usage(),
    }


def join_logprobs(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    """The objects of single tokens as one for all; None if none were asked for."""
    if not parts:
        return None
    return {key: [part[key][0] for part in parts] for key in parts[0]}


def cancel(streams: Iterable[RequestStream]) -> None:
    """Give up what is not finished. Harmless for the rest."""
    for stream in streams:
        stream.cancel()


def wants_stream(completion: CompletionRequest, request: Request) -> bool:
    """An explicit value wins. OpenAI's clients always say so when they stream and accept JSON when they do not."""
    if completion.stream is not None:
        return completion.stream
    accepted = {
        part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")
    }
    return "application/json" not in accepted or "text/event-stream" in accepted


def require_json(request: Request) -> None:
    """A page in a browser can post text to any port of its machine unasked, but not JSON: that it must be allowed.

    Raises:
        ApiError: 400, the body is not called JSON.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(
            400,
            "the body must be JSON; send it with Content-Type: application/json",
            code="invalid_content_type",
        )


async def read_body(request: Request) -> bytes:
    """The request's body.

    Raises:
        ApiError: 413, as soon as it is known to be over the limit.
    """
    too_large = ApiError(
        413, f"the body is over {MAX_BODY_BYTES} bytes, the most this server reads", code="body_too_large"
    )
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise too_large
    return bytes(body)


# ---------------------------------------------------------------------- the other routes


@router.get("/", include_in_schema=False)
async def welcome(request: Request) -> Response:
    """What a person sees who opens the server's address."""
    server: CompletionServer = request.app.state.server
    return Response(server.page, headers=PAGE_HEADERS, media_type="text/html")


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The served model."""
    server: CompletionServer = request.app.state.server
    card = {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "infer",
        "max_model_len": server.engine.max_seq_len,
        "phase": server.engine.phase.slug,
    }
    return json_response({"object": "list", "data": [card]})


@router.get("/health")
async def health(request: Request) -> Response:
    """Whether new requests are taken."""
    server: CompletionServer = request.app.state.server
    if server.worker.dead is not None:
        raise from_exception(EngineDeadError("the engine is dead; restart the server"))
    if server.worker.draining:
        raise from_exception(ShuttingDownError("draining: the server is shutting down"))
    return json_response({"status": "ok", "phase": server.engine.phase.slug})


@router.get("/version")
async def version(request: Request) -> Response:
    """What runs here."""
    engine: Engine = request.app.state.server.engine
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
    """Forget what the prefix cache keeps and nobody uses; in phases that share nothing that is nothing."""
    server: CompletionServer = request.app.state.server
    try:
        dropped = await server.worker.reset_prefix_cache()
    except (EngineDeadError, ShuttingDownError) as error:
        raise from_exception(error) from None
    return json_response({"dropped_blocks": dropped})


@router.get("/telemetry")
async def telemetry(
    request: Request,
    since_step: int | None = Query(
        default=None, ge=0, lt=2**63, description="the page's first step; left out: the latest page"
    ),
) -> Response:
    """The engine's counters, and a page of its latest steps. Async, since a page is soon made: as many threads as
    there are readers would take turns with the engine's."""
    server: CompletionServer = request.app.state.server
    engine = server.engine
    return json_response(
        {
            "phase": engine.phase.slug,
            "max_batch_size": engine.config.max_batch_size,
            "max_seq_len": engine.max_seq_len,
            "queue_room": server.worker.queue_room(),
            **engine.telemetry.snapshot(since_step=since_step),
        }
    )


# ---------------------------------------------------------------------- answers and errors


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


async def answer_api_error(_: Request, error: Exception) -> Response:
    api_error = from_exception(error)
    return json_response(api_error.body(), api_error.status, api_error.headers)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """What the router says: there is no such route, or it has no such method."""
    assert isinstance(error, HTTPException)  # it was registered for these
    served = (
        "chat is not served, text is: POST /v1/completions"
        if request.url.path.startswith("/v1/chat/")
        else "see /openapi.json"
    )
    message = {404: f"there is no such route; {served}", 405: f"this route has no method {request.method}"}
    api_error = ApiError(
        error.status_code,
        message.get(error.status_code, str(error.detail)),
        code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error"),
        headers=error.headers,
    )
    return await answer_api_error(request, api_error)


async def answer_invalid_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # it was registered for these
    first = error.errors()[0]
    syntax = first["type"].endswith(("_type", "_parsing", "_size")) or first["type"] == "missing"
    name = str(first["loc"][-1])
    code = "invalid_type" if syntax else "invalid_value"
    refused = ApiError(400 if syntax else 422, f"{name}: {first['msg']}", param=name, code=code)
    return await answer_api_error(request, refused)


async def answer_nobody(_: Request, __: Exception) -> Response:
    """The client has left: this is sent to a closed connection, for the sake of form (499 is nginx's)."""
    return Response(status_code=499)


async def answer_unexpected_error(request: Request, _: Exception) -> Response:
    """The HTTP server logs the traceback; the client is told that there was one."""
    return await answer_api_error(request, internal_error())
