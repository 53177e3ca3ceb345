"""A server without a scheduler: it runs `common.engine.reference`, our loop for one request, behind HTTP.

The server has the routes that the load generator needs. It sends token ids and does not turn them into text, so
only generation is measured. On a CPU it computes with the native kernels, as the phases do. So a comparison shows
the gain from batching and not the gain from the kernels.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from common.devices.resolve import resolve_device, resolve_dtype
from common.engine.reference import generate
from common.models.layers import CausalLM
from common.models.registry import load_model, open_checkpoint
from common.request import Request, SamplingParams
from kernels.native import load_native_kernels

logger = logging.getLogger(__name__)

#: A function that yields new token ids, given a prompt's token ids and the number of new tokens.
Generate = Callable[[list[int], int], Iterator[int]]


def loop_of(model: CausalLM) -> Generate:
    """Return a function that continues a prompt greedily with `common.engine.reference` on this model."""

    @torch.inference_mode()
    def token_ids(prompt: list[int], max_tokens: int) -> Iterator[int]:
        params = SamplingParams(temperature=0.0, max_new_tokens=max_tokens, ignore_eos=True)
        request = Request("peer", prompt, params)
        for output in generate(model, request):
            if output.token_id is not None:
                yield output.token_id
        if request.error is not None:
            raise request.error

    return token_ids


def create_app(generate_ids: Generate, model: str) -> Starlette:
    """Create an app that answers one request at a time, in the order in which requests arrive."""
    turn = asyncio.Lock()
    thread = ThreadPoolExecutor(1, "generate")

    async def completions(request: HttpRequest) -> Response:
        body = orjson.loads(await request.body())
        if not isinstance(body.get("prompt"), list):
            message = "this peer takes prompts as token ids only: leave --text away"
            return JSONResponse({"error": {"message": message}}, status_code=400)
        return StreamingResponse(stream(body["prompt"], body["max_tokens"]), media_type="text/event-stream")

    async def stream(prompt: list[int], max_tokens: int) -> AsyncIterator[bytes]:
        loop, tokens = asyncio.get_running_loop(), 0
        async with turn:
            token_ids = generate_ids(prompt, max_tokens)
            coming = loop.run_in_executor(thread, next, token_ids, None)
            try:
                while (token_id := await coming) is not None:
                    coming = loop.run_in_executor(thread, next, token_ids, None)  # while this token is sent
                    tokens += 1
                    yield _chunk(text=f"<{token_id}>", token_ids=[token_id], finish_reason=None)
            except Exception as error:
                logger.exception("a request failed")
                yield _event({"error": {"message": f"{type(error).__name__}: {error}"}})
                return
        yield _chunk(text="", finish_reason="length")
        yield _event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": tokens}})
        yield b"data: [DONE]\n\n"

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": model}]})),
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
        ]
    )


def _chunk(**choice: object) -> bytes:
    return _event({"choices": [{"index": 0, **choice}]})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve common.engine.reference, one request at a time.")
    parser.add_argument("--model", default="zoo:llama-tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-seq-len", type=int, default=4096, help="longest sequence, in tokens")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, checkpoint.config.dtype, device)
    limit = min(options.max_seq_len, checkpoint.config.max_position_embeddings)
    model = load_model(checkpoint, device=device, dtype=dtype, max_positions=limit)
    if device.type == "cpu" and load_native_kernels():
        model.pack()
    # uvicorn shuts down, then raises the signal once more. With this handler, the exit code is 0.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    app = create_app(loop_of(model), options.model)
    uvicorn.run(app, host=options.host, port=options.port, access_log=False)  # uvicorn prints the address


if __name__ == "__main__":
    main()
