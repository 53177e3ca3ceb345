"""One burst of requests on less and less KV memory: less memory costs time, and changes no token.

The largest pool holds all requests at once. The smallest holds only the longest request, the least that an engine
accepts. A small pool is slower for two reasons, and each has a column: fewer sequences are computed together
(tokens per step), and a preempted sequence's tokens are computed again (prefilled again). Every request's tokens
are compared with its tokens from the largest pool. The type is float32, because in a type with fewer digits the
rounding depends on which sequences share a pass, and may change a token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

from benchmarks.micro.engines import add, build_engine
from benchmarks.servers import BLOCK_SIZE, find_phase_module
from benchmarks.tables import Cell, MeasuredTable
from common.models.registry import open_checkpoint

PROMPT_TOKENS = (32, 256)
NEW_TOKENS = (32, 96)
SHARES = (1.0, 0.5, 0.35, 0.25, 0.15, 0.1)  # pool sizes: shares of the memory for all requests at once

COLUMNS = [
    *("blocks", "tokens of memory", "output tokens / s", "× the largest pool", "steps", "tokens per step"),
    *("preemptions", "prefilled again, tokens", "same tokens"),
]

Order = tuple[list[int], int]  # a request: prompt token ids, number of new tokens


def draw_orders(count: int, vocab_size: int) -> list[Order]:
    rng = random.Random(0)
    return [
        (rng.choices(range(vocab_size), k=rng.randint(*PROMPT_TOKENS)), rng.randint(*NEW_TOKENS))
        for _ in range(count)
    ]


def pool_sizes(orders: Sequence[Order]) -> list[int]:
    """Return pool sizes in blocks, from memory for all requests down to memory for the largest request alone."""
    blocks = [-(-(len(prompt) + new) // BLOCK_SIZE) for prompt, new in orders]
    ample, smallest = sum(blocks), max(blocks)
    return [*(size for share in SHARES if (size := round(ample * share)) > smallest), smallest]


def serve(
    phase: str, model: str, orders: Sequence[Order], num_blocks: int
) -> tuple[float, list[Cell], list[list[int]]]:
    """Serve all requests (`orders`) at once from a pool of `num_blocks` blocks.

    Returns:
        The seconds taken; the table's cells for steps, tokens a step, preemptions and tokens prefilled again; and
        the token ids of every request.

    Raises:
        RuntimeError: a request did not finish.
    """
    engine = build_engine(
        phase,
        model=model,
        device="cpu",
        dtype="float32",
        max_batch_size=len(orders),
        max_seq_len=max(len(prompt) + new for prompt, new in orders),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
    )
    requests = [add(engine, prompt, new) for prompt, new in orders]
    steps = 0
    started_s = time.perf_counter()
    while engine.has_work:
        engine.step()
        steps += 1
    seconds = time.perf_counter() - started_s
    unfinished = [request.request_id for request in requests if request.finish_reason != "length"]
    if unfinished:
        raise RuntimeError(f"{num_blocks} blocks: {', '.join(unfinished)} did not finish")
    again = engine.telemetry.counters.prefill_tokens - sum(len(prompt) for prompt, _ in orders)
    per_step = sum(new for _, new in orders) / steps
    cells: list[Cell] = [steps, per_step, engine.scheduler.preemptions, again]
    return seconds, cells, [request.token_ids for request in requests]


def measure(phase: str, model: str, orders: Sequence[Order]) -> list[list[Cell]]:
    """Return a row for each pool size; cells as in `COLUMNS`."""
    new_tokens = sum(new for _, new in orders)
    sizes = pool_sizes(orders)
    serve(phase, model, orders[:2], sizes[0])  # warms up
    outcomes = [serve(phase, model, orders, num_blocks) for num_blocks in sizes]
    fastest_s, _, expected = outcomes[0]
    rows: list[list[Cell]] = []
    for num_blocks, (seconds, cells, token_ids) in zip(sizes, outcomes, strict=True):
        same = sum(a == b for a, b in zip(token_ids, expected, strict=True))
        speed = new_tokens / seconds, fastest_s / seconds
        rows.append([num_blocks, num_blocks * BLOCK_SIZE, *speed, *cells, f"{same} of {len(orders)}"])
    return rows


def pools(model: str = "dummy:llama-60m", phase: str = "6", requests: int = 24) -> Iterator[MeasuredTable]:
    """Serve one burst from pools of several sizes.

    Args:
        phase: a phase with blocks
    """
    module = find_phase_module(phase)
    orders = draw_orders(requests, open_checkpoint(model).config.vocab_size)
    yield MeasuredTable(
        name="memory_pressure",
        title=f"{len(orders)} requests at once on less and less memory",
        setup={
            "model": f"{model} in float32",
            "phase": module,
            "prompts of": f"{PROMPT_TOKENS[0]}-{PROMPT_TOKENS[1]} tokens",
            "answers of": f"{NEW_TOKENS[0]}-{NEW_TOKENS[1]}",
        },
        columns=COLUMNS,
        rows=measure(module, model, orders),
    )
