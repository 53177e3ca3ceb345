"""Serves Hugging Face `transformers` over HTTP: `generate` in batches or one by one, or continuous batching.

A dummy model gets the same shape with other random weights: no time depends on their values.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.peers.front import Backend, Job, serve, take_batch
from benchmarks.peers.generate import peer_parser
from common.config import resolve_device, resolve_dtype
from common.models.registry import open_checkpoint
from common.zoo.presets import PRESETS

PAD = 0


class _RowStreamer:
    """Emits each column of new tokens to the jobs of its rows. `generate` calls it once a step."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._left = [job.max_tokens for job in jobs]
        self._prompt_seen = False

    def put(self, values: torch.Tensor) -> None:
        if not self._prompt_seen:  # the first call brings the prompts
            self._prompt_seen = True
            return
        for row, (job, token_id) in enumerate(zip(self._jobs, values.reshape(-1).tolist(), strict=True)):
            if self._left[row] > 0:  # a row that is done runs on with its batch, unheard
                self._left[row] -= 1
                job.emit(token_id)
                if self._left[row] == 0:
                    job.end()

    def end(self) -> None:
        """Do nothing: every job has ended with its own last token."""


class BatchedGenerate:
    """`model.generate` on a left-padded rectangle, until its longest row is done; then the next batch."""

    def __init__(self, model: Any, max_batch_size: int) -> None:
        self._model = model
        self._max_batch_size = max_batch_size

    def serve(self, inbox: queue.Queue[Job]) -> None:
        while True:
            jobs = take_batch(inbox, self._max_batch_size)
            try:
                self._generate(jobs)
            except Exception as error:
                for job in jobs:
                    job.end(error)

    def _generate(self, jobs: Sequence[Job]) -> None:
        longest = max(len(job.prompt) for job in jobs)
        rows = [[PAD] * (longest - len(job.prompt)) + job.prompt for job in jobs]
        mask = [[0] * (longest - len(job.prompt)) + [1] * len(job.prompt) for job in jobs]
        with torch.inference_mode():
            self._model.generate(
                torch.tensor(rows, device=self._model.device),
                attention_mask=torch.tensor(mask, device=self._model.device),
                max_new_tokens=max(job.max_tokens for job in jobs),
                do_sample=False,
                streamer=_RowStreamer(jobs),
            )


class ContinuousBatching:
    """`transformers`' own continuous batching, with as much KV memory as the phases have."""

    def __init__(self, model: Any, max_batch_size: int, kv_tokens: int) -> None:
        from transformers import ContinuousBatchingConfig

        page = 256
        config = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=-(-kv_tokens // page),
            max_requests_per_batch=max_batch_size,
            max_batch_tokens=4096,
        )
        self._manager = model.init_continuous_batching(continuous_batching_config=config)

    def serve(self, inbox: queue.Queue[Job]) -> None:
        """Serve jobs. Results come on an event loop, which this thread runs; another thread waits for jobs."""
        self._manager.start()
        loop = asyncio.new_event_loop()

        def pass_on() -> None:
            for number in itertools.count():
                loop.call_soon_threadsafe(self._start, str(number), inbox.get())

        threading.Thread(target=pass_on, name="inbox", daemon=True).start()
        loop.run_forever()

    def _start(self, name: str, job: Job) -> None:
        said = 0

        def on_output(output: Any) -> None:
            nonlocal said
            for token_id in output.generated_tokens[said:]:
                job.emit(token_id)
            said = len(output.generated_tokens)
            if output.is_finished():
                job.end(RuntimeError(output.error) if output.error else None)

        self._manager.register_result_handler(name, on_output)
        self._manager.add_request(job.prompt, name, max_new_tokens=job.max_tokens, streaming=True)


def load(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a model in `transformers`' own class, set to generate greedily and never to end early."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(name)
    if checkpoint.weights is None:
        shape = dict(PRESETS[name.removeprefix("dummy:")])
        factory: Any = AutoModelForCausalLM
        model = factory.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint.weights, dtype=dtype)
    model = model.to(device).eval()
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id, generation.do_sample = None, PAD, False
    generation.temperature = generation.top_p = generation.top_k = None
    return model


def main() -> None:
    parser = peer_parser("Serve transformers.")
    parser.add_argument("--mode", choices=["batch", "continuous"], default="batch")
    parser.add_argument("--max-batch-size", type=int, default=8)
    parser.add_argument("--kv-tokens", type=int, default=32_768, help="KV memory of continuous batching")
    options = parser.parse_args()

    def make_backend() -> Backend:
        device = resolve_device(options.device)
        dtype = resolve_dtype(options.dtype, open_checkpoint(options.model).config.dtype, device)
        model = load(options.model, device, dtype)
        if options.mode == "batch":
            return BatchedGenerate(model, options.max_batch_size)
        return ContinuousBatching(model, options.max_batch_size, options.kv_tokens)

    serve(
        make_backend,
        model=options.model,
        name=f"transformers {options.mode}",
        host=options.host,
        port=options.port,
    )


if __name__ == "__main__":
    main()
