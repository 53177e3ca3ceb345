"""Attention alone, our kernel beside torch's, by context and number of sequences.

One layer's attention is timed as a model calls it: new keys and values are written, then queries attend. Our kernel
finds the keys through block tables, because blocks may be anywhere in the KV store. torch's
`scaled_dot_product_attention` gets the keys as one tensor, so it has less to do. A decode step has one query for
each sequence. A prompt has a query for each token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.micro import Dtype, say
from benchmarks.micro.on_device import DEVICE, describe, measure_machine, repeated, seconds_of
from benchmarks.tables import Cell, MeasuredTable
from common.kv import KVShape, KVView, Span
from common.models.registry import open_checkpoint
from common.request import Request, SamplingParams
from common.startup.phases import find_phase

COLUMNS = [
    "model",
    "queries",
    "sequences",
    "context",
    "ours, µs",
    "torch, µs",
    "torch ÷ ours",
    "of the bandwidth",
]
REPEATS = 10  # calls in one timed run
LARGEST_KEYS = 8 * 2**30  # bytes of keys and values: larger batches are left out


def view_of(shape: KVShape, sequences: int, context: int, queries: int) -> tuple[KVView, int]:
    """Return a KV view for a pass over the last `queries` tokens of each sequence, and the bytes of all their keys
    and values."""
    package: Any = find_phase("6")  # Any: each phase has its own options and pool
    blocks = sequences * -(-context // 16)
    config = package.Config(max_batch_size=sequences, max_seq_len=context, num_blocks=blocks)
    pool = package.build_engine.pool(config, shape, DEVICE)
    requests = [Request(f"{number}", [0], SamplingParams()) for number in range(sequences)]
    for length in range(
        16, context + 16, 16
    ):  # sequences get blocks in turns, so that no sequence has neighbouring blocks
        for request in requests:
            assert pool.reserve(request, min(length, context))
    slots = [request.slot for request in requests if request.slot is not None]
    random.Random(0).shuffle(slots)
    pool.advance(Span.exact(slot, 0, context - queries) for slot in slots)
    view = pool.view([Span.exact(slot, context - queries, context) for slot in slots])
    return view, sequences * context * shape.bytes_per_token


def times_of(
    shape: KVShape, heads: int, sequences: int, context: int, queries: int
) -> tuple[float, float, int]:
    """Return the seconds of our attention and of torch's, and the bytes of keys and values."""
    view, size = view_of(shape, sequences, context, queries)
    draw = partial(torch.randn, device=DEVICE, dtype=shape.dtype)
    q = draw(sequences * queries, heads, shape.head_dim)
    k, v = (draw(sequences * queries, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    scale = shape.head_dim**-0.5
    ours_s = seconds_of(repeated(lambda: view.attend(0, q, k, v, scale=scale, window=None), REPEATS))
    keys, values = (draw(sequences, shape.num_kv_heads, context, shape.head_dim) for _ in range(2))
    rows = q.view(sequences, queries, heads, shape.head_dim).transpose(1, 2)

    def torchs() -> Tensor:
        return F.scaled_dot_product_attention(
            rows, keys, values, scale=scale, is_causal=queries > 1, enable_gqa=heads != shape.num_kv_heads
        )

    return ours_s / REPEATS, seconds_of(repeated(torchs, REPEATS)) / REPEATS, size


def kernels(
    models: tuple[str, ...] = ("dummy:llama-3.2-1b", "dummy:qwen3-0.6b"),
    sequences: tuple[int, ...] = (1, 8, 64, 256),
    contexts: tuple[int, ...] = (512, 4096, 32768),
    dtype: Dtype = "bfloat16",
) -> Iterator[MeasuredTable]:
    """Time one layer's attention.

    Args:
        sequences: numbers of decoding sequences
        contexts: lengths of sequences, in tokens
    """
    number_type = getattr(torch, dtype)
    machine = measure_machine(number_type)
    table = MeasuredTable(
        name="gpu_attention",
        title="attention of one layer",
        setup={"dtype": dtype, "best of": f"5 runs of {REPEATS} calls", **describe(machine)},
        columns=COLUMNS,
        rows=[],
    )
    for model in models:
        config = open_checkpoint(model).config
        shape = KVShape(1, config.num_kv_heads, config.head_dim, number_type)
        cases = [(count, context, 1) for context in contexts for count in sequences]
        cases += [(1, context, context) for context in contexts]
        for count, context, queries in cases:
            if count * context * shape.bytes_per_token > LARGEST_KEYS:
                continue
            say(f"{model}: {count} × {context}, {queries} queries each")
            ours_s, torch_s, size = times_of(shape, config.num_heads, count, context, queries)
            share = size / ours_s / machine.bytes_per_s if queries == 1 else None
            cells: Sequence[Cell] = [ours_s * 1e6, torch_s * 1e6, torch_s / ours_s, share]
            table.rows.append([model, queries, count, context, *cells])
            yield table
