"""Values of options that were not given, by device: sizes that a CPU's users expect, and sizes that fill a GPU.

| option | on a CPU | on a GPU |
| --- | --- | --- |
| `max_seq_len` | the model's limit, halved until memory allows it | the same |
| `max_batch_size` | 8 | 256, or as many as fit; from phase 6 on, halved until the longest sequence fits |
| `num_blocks` | `max_batch_size` sequences of 4096 tokens, or one at its longest | what fits into nine tenths |
| `prefill_chunk_size`, `prefill_token_budget` | 256 | the fewest tokens that saturate the GPU, measured |
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from common.engine.config import EngineConfig
from common.engine.reference import ContiguousCache
from common.kv import Span
from common.models.config import ModelConfig
from common.models.layers import CausalLM, TokenBatch
from common.request import Request, SamplingParams
from common.startup.memory import estimate_memory, free_memory
from kernels.native import default_cache

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=EngineConfig)

#: The fraction of a GPU's free memory that an engine may take. Libraries allocate memory that no estimate counts.
GPU_SHARE = 0.9
#: The fraction of free memory that an engine with a default `max_seq_len` may take, beside the memory that it takes
#: with `SAFE_SEQ_LEN` in any case. Other programs need the rest, and on a GPU further seats.
CONTEXT_SHARE = 0.5
CHUNKS = (256, 512, 1024, 2048, 4096)  # sizes that are timed, in tokens
SATURATED = 0.9  # a chunk saturates a GPU from this fraction of the best rate on
TRIALS = 3  # timed passes for each size

#: Options whose defaults depend on the device. A phase may lack some of them.
SIZES = ("max_batch_size", "num_blocks", "prefill_chunk_size", "prefill_token_budget")


def with_context(
    config: ConfigT, model: ModelConfig, dtype: torch.dtype, device: torch.device, *, weights: int, limit: int
) -> ConfigT:
    """Return the options with a number for `max_seq_len`, and log where it comes from.

    If it was not given, it is the model's limit, halved until the engine takes at most `CONTEXT_SHARE` of the free
    memory, or as much as with `SAFE_SEQ_LEN`.

    Args:
        config: the options.
        model, dtype, device, weights: as for `estimate_memory`.
        limit: the model's positions.

    Raises:
        StartupError: the option exceeds the model's positions.
    """

    def needed(length: int) -> int:
        sized = config.with_length(length, on_gpu=device.type == "cuda")
        return estimate_memory(sized, model, dtype, device, weights=weights).total

    length = least = config.resolve_max_seq_len(limit)
    origin = "given"
    if config.max_seq_len is None:
        length, origin = limit, "the model's limit"
        usable = max(int(CONTEXT_SHARE * free_memory(device)), needed(least))
        while length > least and needed(length) > usable:
            length = max(length // 2, least)
            origin = f"the model's limit of {limit}, halved until memory allows it"
    logger.info("a request may have %d tokens, prompt and answer together: %s", length, origin)
    return config.model_copy(update={"max_seq_len": length})


def sized_for(
    config: ConfigT, model: ModelConfig, dtype: torch.dtype, device: torch.device, *, weights: int
) -> ConfigT:
    """Return the options. On a GPU, the sizes of the batch and of the KV memory, if they were not given, are set by
    what fits into `GPU_SHARE` of its free memory (see `EngineConfig.for_gpu`).

    Args:
        config: its `max_seq_len` must not be None.
        model, dtype, device, weights: as for `estimate_memory`.
    """
    if device.type != "cuda":
        return config
    usable = GPU_SHARE * free_memory(device)

    def fits(sized: EngineConfig) -> bool:
        widest = sized.with_chunk(CHUNKS[-1])  # the chunk is measured later, and this is the largest
        return estimate_memory(widest, model, dtype, device, weights=weights).total <= usable

    return config.for_gpu(fits)


def with_measured_chunk(config: ConfigT, model: CausalLM, cache: Path | None = None) -> ConfigT:
    """Return the options. On a GPU, the size of prefill chunks, if it was not given, is the smallest that saturates
    the GPU.

    Measuring this size takes seconds. The measured times are kept in a file, which later starts read.

    Args:
        config: its `max_seq_len` must not be None.
        model: the model whose forward passes are timed.
        cache: folder of the file; default: the user's cache folder.
    """
    if model.device.type != "cuda" or config.with_chunk(CHUNKS[-1]) is config:
        return config
    name = torch.cuda.get_device_name(model.device)
    assert config.max_seq_len is not None
    longest = min(config.max_seq_len, CHUNKS[-1])  # longer chunks are not timed
    measured = (name, torch.__version__, model.config, model.dtype, longest)
    key = hashlib.sha256(repr(measured).encode()).hexdigest()[:16]
    path = (cache or default_cache()) / f"chunks-{key}.json"
    return config.with_chunk(min(longest, measured_chunk(path, lambda n: pass_s(model, n), name)))


def measured_chunk(path: Path, pass_s: Callable[[int], float | None], device: str) -> int:
    """Return the smallest chunk, in tokens, that saturates a GPU, by the times in a file.

    If the file cannot be read, time the passes and write the file.

    Args:
        path: the file: a JSON object with the seconds of a pass by its number of tokens.
        pass_s: takes a number of tokens and returns the seconds of a pass over a prompt of that length. Returns
            None if the prompt is too long for the model.
        device: the device's name, for the log.
    """
    try:
        seconds = {int(size): each for size, each in json.loads(path.read_text()).items()}
        origin = f"measured before ({path})"
    except (OSError, ValueError):
        seconds = {size: each for size in CHUNKS if (each := pass_s(size)) is not None}
        origin = "measured now"
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(seconds))
        scratch.replace(path)
    chunk = saturating(seconds)
    rates = ", ".join(f"{size}: {size / each:,.0f}" for size, each in seconds.items())
    logger.info("chunks of %d tokens saturate %s, %s; tokens/s by chunk: %s", chunk, device, origin, rates)
    return chunk


def saturating(seconds: Mapping[int, float]) -> int:
    """Return the smallest chunk, in tokens, that is computed at nearly the best rate (`SATURATED`).

    `seconds`: the time of a pass, by the size of its chunk. If `seconds` is empty, returns the first of `CHUNKS`.
    """
    best = max((size / each for size, each in seconds.items()), default=0.0)
    return next(
        (size for size, each in sorted(seconds.items()) if size / each >= SATURATED * best), CHUNKS[0]
    )


def pass_s(model: CausalLM, tokens: int) -> float | None:
    """Return the seconds of a pass over a prompt of `tokens` tokens, the fastest of `TRIALS` passes.

    Returns None if the model has fewer than `tokens` positions.
    """
    if tokens > model.max_positions:
        return None
    cache = ContiguousCache(model.config.kv_shape(model.dtype), model.device, tokens)
    cache.reserve(Request("measured", [0], SamplingParams()), tokens)
    view = cache.view([Span.exact(0, 0, tokens)])
    token_ids = torch.zeros(tokens, dtype=torch.int64, device=model.device)
    batch = TokenBatch(token_ids, view.positions, torch.tensor([tokens - 1], device=model.device))
    times = []
    for _ in range(1 + TRIALS):  # the first warms up
        began_s = time.perf_counter()
        with torch.inference_mode():
            model(batch, view)[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - began_s)
    return min(times[1:])


def log_sizes(given: EngineConfig, used: EngineConfig) -> None:
    """Log the size of the KV memory, and the options in `SIZES` that the phase has. For each option, log whether it
    was given, was set for the device, or is the default."""
    words = []
    for name in SIZES:
        if name in type(used).model_fields:
            value = getattr(used, name)
            changed = value != getattr(given, name)
            origin = (
                "given" if name in given.model_fields_set else "set for this device" if changed else "default"
            )
            words.append(f"{name} {value} ({origin})")
    logger.info("sizes: %s; KV memory: %s tokens", ", ".join(words), used.kv_formula())
