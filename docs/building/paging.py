"""Tables of the pages on paged attention and chunked prefill: arithmetic, done when the site is built."""

from __future__ import annotations

import torch

import phase5_continuous
import phase6_paged
import phase7_chunked
from benchmarks.servers import SEQUENCES_PER_SLOT
from common.kv import kv_bytes
from common.memory import format_bytes
from common.server.options import flag_of
from docs.building.memory import LENGTH, SEQUENCES, config_of

SLOTS, SLOT_LENGTH, BLOCK = SEQUENCES, LENGTH, 16
BLOCKS = SLOTS * SLOT_LENGTH // BLOCK


def capacity_table() -> str:
    """Sequences that the same bytes hold, in slots and in blocks, by their average length."""
    rows = [
        f"| average length | {SLOTS} slots of {SLOT_LENGTH} | {BLOCKS} blocks of {BLOCK} |",
        "| ---: | ---: | ---: |",
    ]
    rows += [
        f"| {length} | {SLOTS} | {BLOCKS // -(-length // BLOCK)} |" for length in (256, 512, 1024, 2048, 4096)
    ]
    return "\n".join(rows) + "\n"


def seats_table() -> str:
    """Seats and KV memory by the options that a phase is started with."""
    seats = SLOTS * SEQUENCES_PER_SLOT
    starts = [
        (phase5_continuous, {}),
        (phase6_paged, {}),
        (phase6_paged, {"max_batch_size": seats}),
        (phase6_paged, {"max_batch_size": seats, "num_blocks": BLOCKS}),
    ]
    rows = ["| phase | started with | seats | tokens of KV memory |", "| --- | --- | ---: | ---: |"]
    for phase, options in starts:
        config = phase.Config(max_seq_len=SLOT_LENGTH, **options)
        flags = " ".join(f"{flag_of(name)} {value}" for name, value in options.items())
        rows.append(
            f"| phase {phase.PHASE.number} | {f'`{flags}`' if flags else 'its defaults'} "
            f"| {config.max_batch_size} | {config.kv_tokens()} |"
        )
    return "\n".join(rows) + "\n"


def block_size(model: str) -> str:
    """Memory of one block over all layers of a model, in bfloat16."""
    return format_bytes(kv_bytes(config_of(model), BLOCK, torch.bfloat16))


def chunk_table(prompt: int = 2048) -> str:
    """What cutting one prompt costs, by chunk size."""
    default = phase7_chunked.Config().prefill_chunk_size
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
