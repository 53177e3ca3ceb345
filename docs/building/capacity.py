"""Capacity planning: how many sequences fit into a GPU's memory, and how long a decode step of them takes.

Memory comes from the estimate that a server makes when it starts, time from the simulator with a device that is
described by its data sheet. The page's arithmetic stands beside both. If a simulated step and its arithmetic differ
by more than `arithmetic.FACTOR`, the build of the site fails.
"""

from __future__ import annotations

import functools
import random

import torch

from common.models.registry import open_checkpoint, weight_bytes
from common.startup.memory import MemoryEstimate, estimate_memory
from docs.building.arithmetic import checked
from docs.building.markdown import table
from phase9_pipelined.config import Config
from simulator.arrivals import Arrival, Unlike
from simulator.cost import Device, RooflineCost
from simulator.engine import simulate_engine
from simulator.loop import run
from simulator.observers import Summary

MODEL = "dummy:llama-3.1-8b"
GB = 2**30
MEMORY = 80 * GB
DEVICE = Device(bytes_per_s=3350e9, flops=990e12)  # an H100's data sheet
CONTEXTS = (1024, 4096, 8192, 32_768, 131_072)
CONTEXT, ANSWER = 4096, 2048  # tokens of a simulated sequence, and how many of them are generated
USERS = (1, 16, 64)  # numbers of users in the table, which adds the largest number that fits
CHUNK = 1536  # tokens; the page on phase 7 estimates such a chunk for a time of 50 ms between tokens
SHARED = 2048  # tokens of a prefix that all prompts share

_checkpoint = functools.partial(open_checkpoint, MODEL)


def estimate(sequences: int, context: int) -> MemoryEstimate:
    """Return the memory that phase 9 takes on a GPU, with KV memory for `sequences` of `context` tokens each."""
    shape = _checkpoint().config
    config = Config(
        max_batch_size=sequences, max_seq_len=context, block_size=1, num_blocks=sequences * context
    )
    weights = weight_bytes(shape, shape.dtype)
    return estimate_memory(config, shape, shape.dtype, torch.device("cuda"), weights=weights)


def most_sequences(context: int) -> int:
    """Return how many sequences of `context` tokens fit into `MEMORY`, by the server's estimate."""
    few, many = 0, MEMORY // token_bytes() // context + 1
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if estimate(middle, context).total <= MEMORY else (few, middle)
    return few


def token_bytes() -> int:
    shape = _checkpoint().config
    return shape.kv_shape(shape.dtype).bytes_per_token


def capacity_by_hand() -> str:
    """Return the table that computes the memory by hand: quantity, arithmetic, result."""
    shape = _checkpoint().config
    weights = weight_bytes(shape, shape.dtype)
    left, number = MEMORY - weights, shape.dtype.itemsize
    heads = f"{shape.num_layers} layers × {shape.num_kv_heads} KV heads × {shape.head_dim} numbers"
    assert token_bytes() == 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * number
    rows = [
        ["weights", f"{weights / number / 1e9:.2f} billion × {number} bytes", f"{weights / GB:.1f} GB"],
        ["left for KV", f"80 GB − {weights / GB:.1f} GB", f"{left / GB:.1f} GB"],
        ["KV of a token", f"2 × {heads} × {number} bytes", f"{token_bytes() / 2**10:.0f} kB"],
        ["tokens", f"{left / GB:.1f} GB / {token_bytes() / 2**10:.0f} kB", f"{left // token_bytes():,}"],
    ]
    return table(["quantity", "arithmetic", "result"], rows, "llr")


def capacity_fact(name: str) -> str:
    """Return one number for a sentence of the page.

    Args:
        name: `alone`: users of `CONTEXT` tokens that fit; `shared`: users that fit if they share `SHARED` tokens;
            `all heads`: users that would fit if each query head had keys and values of its own; `idle`:
            milliseconds to read the weights.
    """
    shape = _checkpoint().config
    weights = weight_bytes(shape, shape.dtype)
    tokens = (MEMORY - weights) // token_bytes()
    return {
        "shared": f"{(tokens - SHARED) // (CONTEXT - SHARED)}",
        "alone": f"{tokens // CONTEXT}",
        "all heads": f"{tokens // CONTEXT * shape.num_kv_heads // shape.num_heads}",
        "idle": f"{weights / DEVICE.bytes_per_s / DEVICE.efficiency * 1e3:.1f}",
    }[name]


def capacity_table() -> str:
    """Return the table of how many sequences fit, for several context lengths: by division, and by the server's
    estimate."""
    shape = _checkpoint().config
    free = MEMORY - weight_bytes(shape, shape.dtype)
    rows = []
    for context in CONTEXTS:
        fit = most_sequences(context)
        parts = estimate(fit, context)
        rest = parts.activations + parts.sampling + parts.graphs
        rows.append(
            [
                f"{context:,}",
                f"{free // token_bytes() // context}",
                f"**{fit}**",
                f"{parts.kv_cache / GB:.1f} GB",
                f"{rest / GB:.1f} GB",
            ]
        )
    head = ["context, tokens", "by division", "by the server's estimate", "KV memory", "a pass and sampling"]
    return table(head, rows, "rrrrr")


def capacity_times() -> str:
    """Return the table of simulated times for several numbers of users, each beside the step's time by arithmetic.

    Raises:
        WrongPredictionError: arithmetic and simulation differ by more than `arithmetic.FACTOR`.
    """
    shape = _checkpoint().config
    weights = weight_bytes(shape, shape.dtype)
    rows = []
    for users in (*USERS, most_sequences(CONTEXT)):
        held = users * (CONTEXT - ANSWER // 2) * token_bytes()
        step = (weights + held) / DEVICE.bytes_per_s / DEVICE.efficiency + DEVICE.launch_s
        engine = simulate_engine(
            9,
            RooflineCost(shape, DEVICE),
            model=MODEL,
            max_batch_size=users,
            max_seq_len=CONTEXT,
            prefill_chunk_size=CHUNK,
        )
        seen, write = Summary([engine]), Unlike()
        prompts = (write(random.Random(user), CONTEXT - ANSWER) for user in range(users))
        run([engine], (Arrival(user, 0.0, prompt, ANSWER) for user, prompt in enumerate(prompts)), seen)
        metrics = seen.metrics()
        assert metrics.itl_s is not None
        assert metrics.ttft_s is not None
        itl = metrics.itl_s.p50
        checked(f"a step of {users} users", step, itl)
        rows.append(
            [
                f"{users}",
                f"{held / 1e9:.1f} GB",
                f"{step * 1e3:.0f} ms",
                f"{itl * 1e3:.0f} ms",
                f"{1 / itl:.0f}",
                f"{users / itl:,.0f}",
                f"{metrics.ttft_s.p50:.1f} s",
            ]
        )
    head = ["users", "KV read", "step by hand", "simulated ITL p50", "tokens/s for each", "tokens/s for all"]
    return table([*head, "TTFT p50"], rows, "rrrrrrr")
