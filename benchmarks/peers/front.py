"""A small HTTP server in front of any generator, so that a peer can be measured like a phase.

It knows one route and plain OpenAI chunks, and passes token ids on without turning them into text: a peer is not
charged for more than generating.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """One request on its way through a peer. A backend calls `emit` for each token, then `end` once.

    Both may be called from any thread.
    """

    prompt: list[int]
    max_tokens: int
    _loop: asyncio.AbstractEventLoop
    _outputs: asyncio.Queue[int | Exception | None] = field(default_factory=asyncio.Queue)

    def emit(self, token_id: int) -> None:
        self._put(token_id)

    def end(self, error: Exception | None = None) -> None:
        self._put(error)

    def _put(self, output: int | Exception | None) -> None:
        self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)

    async def outputs(self) -> AsyncIterator[int]:
        """Yield token ids as they come.

        Raises:
            Exception: what the backend ended with.
        """
        while (output := await self._outputs.get()) is not None:
            if isinstance(output, Exception):
                raise output
            yield output


class Backend(Protocol):
    """A generator behind the front."""

    def serve(self, inbox: queue.Queue[Job]) -> None:
        """Take jobs and end every one of them; runs forever, in a thread of its own."""


def take_batch(inbox: queue.Queue[Job], limit: int, wait_s: float = 0.05) -> list[Job]:
    """Wait for a job, then a moment for more jobs, as static batching does."""
    jobs = [inbox.get()]
    while len(jobs) < limit:
        try:
            jobs.append(inbox.get(timeout=wait_s))
        except queue.Empty:
            break
    return jobs


def create_app(backend: Backend, model: str, name: str) -> Starlette:
    """Create an app with the routes that the load generator needs."""
    inbox: queue.Queue[Job] = queue.Queue()
    threading.Thread(target=backend.serve, args=(inbox,), name="backend", daemon=True).start()

    async def completions(request: HttpRequest) -> Response:
        body = orjson.loads(await request.body())
        if not isinstance(body.get("prompt"), list):
            message = "this peer takes prompts as token ids only: leave --text away"
            return JSONResponse({"error": {"message": message}}, status_code=400)
        job = Job(body["prompt"], body["max_tokens"], asyncio.get_running_loop())
        inbox.put(job)
        return StreamingResponse(_stream(job), media_type="text/event-stream")

    async def health(_: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": model, "object": "model"}]})

    async def version(_: HttpRequest) -> Response:
        return JSONResponse({"peer": name})

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/version", version),
        ]
    )


async def _stream(job: Job) -> AsyncIterator[bytes]:
    tokens = 0
    try:
        async for token_id in job.outputs():
            tokens += 1
            choice = {"index": 0, "text": f"<{token_id}>", "token_ids": [token_id], "finish_reason": None}
            yield _event({"choices": [choice]})
    except Exception as error:
        logger.exception("a request failed")
        yield _event({"error": {"message": f"{type(error).__name__}: {error}"}})
        return
    usage = {"prompt_tokens": len(job.prompt), "completion_tokens": tokens}
    yield _event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    yield _event({"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def serve(make_backend: Callable[[], Backend], *, model: str, name: str, host: str, port: int) -> None:
    """Load the backend, print the address, and serve until SIGTERM."""
    # uvicorn shuts down in good order, then raises the signal once more: with this it ends well instead of badly.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    app = create_app(make_backend(), model, name)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        print(f"ready: {name} at http://{host}:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
