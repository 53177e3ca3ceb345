"""The published benchmark of nano-vllm, without a server: 256 requests at once.

Prompts and answers have 100 to 1,024 tokens each, drawn at random. The README of nano-vllm has 1,434 output tokens
a second for nano-vllm and 1,362 for vLLM, with Qwen3-0.6B on an RTX 4070 for laptops. Compare numbers of one GPU
only. Here the weights are random. This changes no time, because answers have the lengths that were drawn and no
end-of-text token ends them.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator

from benchmarks.micro import Dtype, say
from benchmarks.micro.on_device import DEVICE, Loaded, free_unused
from benchmarks.tables import MeasuredTable
from common.engine.engine import Engine
from common.request import Request, SamplingParams

TEMPERATURE = 0.6


def orders_of(requests: int, fewest: int, most: int, vocab_size: int) -> list[tuple[list[int], int]]:
    """Draw requests: the token ids of each prompt, and the number of tokens to generate."""
    draw = random.Random(0)
    prompts = [
        [draw.randrange(min(10_000, vocab_size)) for _ in range(draw.randint(fewest, most))]
        for _ in range(requests)
    ]
    return [(prompt, draw.randint(fewest, most)) for prompt in prompts]


def serve(engine: Engine, requests: list[Request], seconds: float) -> tuple[int, float]:
    """Serve requests until all have ended or `seconds` are over, and abort the others. Returns the number of
    generated tokens and the seconds taken."""
    pending, tokens, began_s = deque(requests), 0, time.perf_counter()
    while (pending or engine.has_work) and time.perf_counter() - began_s < seconds:
        while pending and engine.add_request(pending[0]):
            pending.popleft()
        for output in engine.step():
            if output.error is not None:
                raise output.error
            tokens += output.token_id is not None
    taken_s = time.perf_counter() - began_s
    engine.abort_all(RuntimeError("the time is up"))
    return tokens, taken_s


def throughput(
    model: str = "dummy:qwen3-0.6b",
    phases: tuple[str, ...] = ("9", "8", "6", "5"),
    requests: int = 256,
    fewest: int = 100,
    most: int = 1024,
    seats: int = 256,
    seconds: float = 90.0,
    dtype: Dtype = "bfloat16",
) -> Iterator[MeasuredTable]:
    """Measure output tokens a second.

    Args:
        phases: numbers or names
        fewest: the smallest number of tokens of a prompt, and of an answer
        most: the largest number of tokens of a prompt, and of an answer
        seats: sequences computed together
        seconds: time limit of a phase; the row of a phase that was stopped says so
    """
    loaded = Loaded.of(model, dtype, 2 * most)
    orders = orders_of(requests, fewest, most, loaded.model.config.vocab_size)
    wanted = sum(new_tokens for _, new_tokens in orders)
    table = MeasuredTable(
        name="offline",
        title="output tokens a second, offline",
        setup={
            "model": f"{model} in {dtype}, on {DEVICE}",
            "requests": f"{requests}, prompts and answers of {fewest} to {most} tokens",
            "output tokens": f"{wanted:,}",
        },
        columns=["phase", "tokens / s", "tokens", "seconds", "ended"],
        rows=[],
    )
    for phase in phases:
        say(f"phase {phase}")
        engine = loaded.engine(
            phase,
            max_batch_size=seats,
            max_seq_len=2 * most,
            max_waiting_requests=seats,
            prefill_chunk_size=2048,
        )
        serve(engine, [_request(engine, prompt[:16], 4) for prompt, _ in orders[:4]], seconds)  # compiles
        made = [_request(engine, prompt, new_tokens) for prompt, new_tokens in orders]
        tokens, taken_s = serve(engine, made, seconds)
        table.rows.append(
            [phase, tokens / taken_s, tokens, taken_s, "yes" if tokens == wanted else "stopped"]
        )
        yield table
        del engine, made
        free_unused()


def _request(engine: Engine, prompt: list[int], new_tokens: int) -> Request:
    params = SamplingParams(temperature=TEMPERATURE, max_new_tokens=new_tokens, ignore_eos=True)
    return engine.maker.create(prompt, params)
