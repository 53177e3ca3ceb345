"""The time that prefix caching takes on the host, for prompts in the cache and for others.

```text
match            find a prompt that is in the tree as a whole
match, insert    look for a prompt that is not in the tree, then add it
let go           release the prompt's blocks when its sequence ends
evict            evict as many blocks as the prompt has
look             check that the prompt's keys and values are finite, before they are shared
```
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.servers import BLOCK_SIZE
from benchmarks.tables import Cell, MeasuredTable
from common.kv import KVShape, Span
from common.models.registry import open_checkpoint
from common.phases import find_phase
from common.request import Request, SamplingParams

PHASE, MODEL = "prefix", "dummy:llama-60m"
PROMPT_TOKENS, ROUNDS, VOCABULARY = 4096, 100, 128_000
PARTS = ("match", "match, insert", "let go", "evict", "look")


def make_pool(model: str) -> Any:
    """Build phase 8's pool for one sequence of the prompt's length."""
    package: Any = find_phase(PHASE)
    config = package.Config(max_batch_size=1, max_seq_len=PROMPT_TOKENS + BLOCK_SIZE, block_size=BLOCK_SIZE)
    shape = KVShape.of(open_checkpoint(model).config, torch.bfloat16)
    return package.build_engine.pool(config, shape, torch.device("cpu"))


def draw_prompt(rng: random.Random) -> list[int]:
    return rng.choices(range(VOCABULARY), k=PROMPT_TOKENS)


def seconds(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Call a function. Returns the seconds it took, and its result."""
    started_s = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - started_s, result


def grown_tree(tree: Any, nodes: int, rng: random.Random) -> Any:
    """Fill a tree with prompts that no sequence uses, until it has `nodes` nodes."""
    blocks = PROMPT_TOKENS // BLOCK_SIZE
    for first in range(0, nodes, blocks):
        tree.release(tree.insert(draw_prompt(rng), range(first, min(first + blocks, nodes))))
    return tree


def tree_times(tree: Any, rng: random.Random) -> list[dict[str, float]]:
    """Return the seconds of each part, round by round. The tree keeps its size."""
    rounds = []
    blocks = range(PROMPT_TOKENS // BLOCK_SIZE)
    for _ in range(ROUNDS):
        prompt = draw_prompt(rng)
        found: dict[str, float] = {}
        looked_for, _ = seconds(tree.match, prompt)
        added, path = seconds(tree.insert, prompt, blocks)
        found["match, insert"] = looked_for + added
        found["let go"], _ = seconds(tree.release, path)
        found["match"], hits = seconds(tree.match, prompt)
        assert len(hits) == len(blocks)
        found["evict"], _ = seconds(tree.evict, len(blocks))
        rounds.append(found)
    return rounds


def look_times(pool: Any, rng: random.Random) -> list[float]:
    """Return the seconds that checking a prompt's keys and values takes, without registering them."""
    times = []
    for store in (pool.k[-1], pool.v[-1]):
        store.fill_(1.0)  # the system provides memory only when it is first written
    for _ in range(ROUNDS):
        request = Request("look", draw_prompt(rng), SamplingParams())
        assert pool.reserve(request, PROMPT_TOKENS)
        pool.advance([Span.exact(request.slot or 0, 0, PROMPT_TOKENS)])
        looked, _ = seconds(pool.register_prefix, request, PROMPT_TOKENS)
        blocks = pool.block_table(request.slot)
        pool.release(request)
        pool.reset_prefix_cache()
        added, path = seconds(pool.tree.insert, request.token_ids, blocks)
        pool.tree.release(path)
        pool.tree.evict(len(path))
        times.append(max(0.0, looked - added))
    return times


def books(nodes: tuple[int, ...] = (1000, 10_000, 100_000), model: str = MODEL) -> Iterator[MeasuredTable]:
    """Time the cache's work for a prompt in trees of several sizes.

    Args:
        model: whose keys and values are looked at
    """
    rng = random.Random(0)
    look = statistics.median(look_times(make_pool(model), rng))
    rows: list[list[Cell]] = []
    for count in nodes:
        rounds = tree_times(grown_tree(make_pool(model).tree, count, rng), rng)
        medians = {part: statistics.median(each[part] for each in rounds) for part in rounds[0]}
        rows.append([count, *((medians | {"look": look})[part] * 1e3 for part in PARTS)])
        gc.collect()
    yield MeasuredTable(
        name="prefix_tree",
        title="the prefix cache's books",
        setup={
            "for a prompt of": f"{PROMPT_TOKENS} tokens in blocks of {BLOCK_SIZE}",
            "keys and values of": f"{model}, bfloat16",
            "median of": f"{ROUNDS} prompts",
        },
        columns=["nodes in the tree", *(f"{part}, ms" for part in PARTS)],
        rows=rows,
    )
