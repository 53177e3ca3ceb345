"""Our own loop for one request behind HTTP: generation without any scheduler."""

from __future__ import annotations

import argparse
import itertools
import queue

import torch

from benchmarks.peers.front import Job, serve
from common.config import resolve_device, resolve_dtype
from common.generate import generate
from common.models.layers import CausalLM
from common.models.registry import load_model, open_checkpoint
from common.request import Request, SamplingParams


class OneByOne:
    """Serves requests with `common.generate.generate`, one at a time, in the order they came."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def serve(self, inbox: queue.Queue[Job]) -> None:
        for number in itertools.count():
            job = inbox.get()
            params = SamplingParams(temperature=0.0, max_new_tokens=job.max_tokens, ignore_eos=True)
            request = Request(str(number), job.prompt, params)
            try:
                with torch.inference_mode():
                    for output in generate(self._model, request):
                        if output.token_id is not None:
                            job.emit(output.token_id)
            except Exception as error:
                job.end(error)
            else:
                job.end(request.error)


def peer_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every peer."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="zoo:llama-tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-seq-len", type=int, default=4096, help="longest sequence, in tokens")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    return parser


def main() -> None:
    options = peer_parser("Serve common.generate, one request at a time.").parse_args()

    def make_backend() -> OneByOne:
        checkpoint = open_checkpoint(options.model)
        device = resolve_device(options.device)
        dtype = resolve_dtype(options.dtype, checkpoint.config.dtype, device)
        limit = min(options.max_seq_len, checkpoint.config.max_position_embeddings)
        return OneByOne(load_model(checkpoint, device=device, dtype=dtype, max_positions=limit))

    serve(make_backend, model=options.model, name="generate()", host=options.host, port=options.port)


if __name__ == "__main__":
    main()
