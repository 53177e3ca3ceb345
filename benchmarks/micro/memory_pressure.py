"""One burst of requests on less and less KV memory: it costs time, and changes no token.

The pool shrinks from room for everybody to room for the longest request alone, the smallest that is legal. Two
things can make that slow, and each has a column: fewer sequences are computed together (tokens per step), and what
a preempted sequence had in the cache is computed once more (prefilled again). Every request's tokens are compared
with those it got from the largest pool. In float32, since in a type with fewer digits rounding depends on who
shares a pass, and a flipped token would be nobody's fault.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.micro.passes import load_unpacked
from benchmarks.tables import Cell, MeasuredTable
from common.models.layers import CausalLM
from common.models.registry import open_checkpoint
from common.phases import find_phase
from common.request import SamplingParams
from common.text import Tokenizer

BLOCK_SIZE = 16
PROMPT_TOKENS = (32, 256)
NEW_TOKENS = (32, 96)
SHARES = (1.0, 0.5, 0.35, 0.25, 0.15, 0.1)  # of the memory that holds everybody at once

COLUMNS = [
    "blocks",
    "tokens of memory",
    "output tokens / s",
    "× the largest pool",
    "steps",
    "tokens per step",
    "preemptions",
    "prefilled again, tokens",
    "same tokens",
]

Order = tuple[list[int], int]  # prompt, new tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """The burst on one pool size: its seconds, and the tokens of every request.

    Attributes:
        recomputed: tokens, prompt and generated, that were prefilled after a preemption.
    """

    seconds: float
    steps: int
    preemptions: int
    recomputed: int
    token_ids: list[list[int]]


def draw_orders(count: int, vocab_size: int, seed: int = 0) -> list[Order]:
    rng = random.Random(seed)
    return [
        ([rng.randrange(vocab_size) for _ in range(rng.randint(*PROMPT_TOKENS))], rng.randint(*NEW_TOKENS))
        for _ in range(count)
    ]


def blocks_of(order: Order) -> int:
    prompt, new_tokens = order
    return -(-(len(prompt) + new_tokens) // BLOCK_SIZE)


def pool_sizes(orders: list[Order]) -> list[int]:
    """Return pool sizes in blocks, from memory for all orders down to memory for the largest one."""
    ample = sum(map(blocks_of, orders))
    smallest = max(map(blocks_of, orders))
    return [*(size for share in SHARES if (size := round(ample * share)) > smallest), smallest]


def serve(phase: str, model: CausalLM, tokenizer: Tokenizer, orders: list[Order], num_blocks: int) -> Outcome:
    package = find_phase(phase)
    options: dict[str, int] = {  # of a phase that is known by name only
        "max_batch_size": len(orders),
        "max_seq_len": max(len(prompt) + new for prompt, new in orders),
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks,
    }
    engine = package.build_engine(package.Config(**options), model=model, tokenizer=tokenizer)
    requests = [
        engine.create_request(prompt, SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True))
        for prompt, new in orders
    ]
    for request in requests:
        engine.add_request(request)
    steps = 0
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
        steps += 1
    seconds = time.perf_counter() - started
    unfinished = [request.request_id for request in requests if request.finish_reason != "length"]
    if unfinished:
        raise RuntimeError(f"{num_blocks} blocks: {', '.join(unfinished)} did not finish")
    recomputed = engine.telemetry.counters.prefill_tokens - sum(len(prompt) for prompt, _ in orders)
    return Outcome(seconds, steps, engine.scheduler.preemptions, recomputed, [r.token_ids for r in requests])


def measure(phase: str, model: CausalLM, tokenizer: Tokenizer, orders: list[Order]) -> list[list[Cell]]:
    """Return a row for each pool size; cells as in `COLUMNS`."""
    new_tokens = sum(new for _, new in orders)
    serve(phase, model, tokenizer, orders[:2], pool_sizes(orders)[0])  # warm
    rows: list[list[Cell]] = []
    first: Outcome | None = None
    for num_blocks in pool_sizes(orders):
        outcome = serve(phase, model, tokenizer, orders, num_blocks)
        first = first or outcome
        same = sum(a == b for a, b in zip(outcome.token_ids, first.token_ids, strict=True))
        rate, of_first = (new_tokens / each.seconds for each in (outcome, first))
        rows.append(
            [
                num_blocks,
                num_blocks * BLOCK_SIZE,
                rate,
                rate / of_first,
                outcome.steps,
                new_tokens / outcome.steps,
                outcome.preemptions,
                outcome.recomputed,
                f"{same} of {len(orders)}",
            ]
        )
    return rows


def pools(
    model: str = "dummy:llama-60m", phase: str = "phase6_paged", requests: int = 24
) -> Iterator[MeasuredTable]:
    """Serve one burst from pools of several sizes.

    Args:
        phase: one with blocks
    """
    positions = PROMPT_TOKENS[1] + NEW_TOKENS[1]
    loaded = load_unpacked(model, torch.float32, positions)
    orders = draw_orders(requests, loaded.config.vocab_size)
    yield MeasuredTable(
        name="memory_pressure",
        title=f"{len(orders)} requests at once on less and less memory",
        setup={
            "model": f"{model} in float32",
            "phase": phase,
            "prompts of": f"{PROMPT_TOKENS[0]}-{PROMPT_TOKENS[1]} tokens",
            "answers of": f"{NEW_TOKENS[0]}-{NEW_TOKENS[1]}",
        },
        columns=COLUMNS,
        rows=measure(phase, loaded, open_checkpoint(model).tokenizer(), orders),
    )
