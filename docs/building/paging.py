"""Tables of the pages on paged attention and chunked prefill: arithmetic, done when the site is built."""

from __future__ import annotations

import torch

from common.kv import KVShape
from common.memory import format_bytes
from docs.building.memory import config_of, kv_size
from phase7_chunked import Config

SLOTS, SLOT_LENGTH, BLOCK = 8, 4096, 16


def capacity_table() -> str:
    """Sequences that the same bytes hold, in slots and in blocks, by their average length."""
    blocks = SLOTS * SLOT_LENGTH // BLOCK
    rows = [
        f"| average length | {SLOTS} slots of {SLOT_LENGTH} | {blocks} blocks of {BLOCK} |",
        "| ---: | ---: | ---: |",
    ]
    rows += [
        f"| {length} | {SLOTS} | {blocks // -(-length // BLOCK)} |" for length in (256, 512, 1024, 2048, 4096)
    ]
    return "\n".join(rows) + "\n"


def block_table_size(model: str) -> str:
    """Bytes of one block over all layers of a model."""
    return format_bytes(KVShape.of(config_of(model), torch.bfloat16).bytes_per_token * BLOCK)


def chunk_table(prompt: int = 2048) -> str:
    """What cutting one prompt costs, by chunk size."""
    default = Config().prefill_chunk_size
    rows = [
        "| chunk | steps to the first token | keys read by all chunks | against one pass |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for chunk in (128, 256, 512, 1024, 2048):
        steps = -(-prompt // chunk)
        keys = sum(min(chunk * (i + 1), prompt) for i in range(steps))
        mark = " (default)" if chunk == default else ""
        rows.append(f"| {chunk}{mark} | {steps} | {keys} | {keys / prompt:.1f} × |")
    return "\n".join(rows) + "\n"


def weight_reads(model: str, chunks: int) -> dict[str, str]:
    """Bytes of weights read by `chunks` chunks in a pass each, and in one pass."""
    config = config_of(model)
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    parameters = config.num_layers * (attention + mlp) + config.vocab_size * config.hidden_size
    size = parameters * torch.bfloat16.itemsize
    return {"apart": format_bytes(chunks * size), "together": format_bytes(size)}


__all__ = ["block_table_size", "capacity_table", "chunk_table", "kv_size", "weight_reads"]
