"""Values of options that were not given, by device: sizes that a CPU's users expect, and sizes that fill a GPU.

| option | on a CPU | on a GPU |
| --- | --- | --- |
| `max_seq_len` | the model's limit, halved until memory allows it | the same |
| `max_batch_size` | 8 | 256, or as many as fit; from phase 6 on, halved until the longest sequence fits |
| `num_blocks` | `max_batch_size` sequences of 4096 tokens, or one at its longest | what fits into nine tenths |
| `prefill_chunk_size`, `prefill_token_budget` | 256 | 2048 |
"""

from __future__ import annotations

import logging
from typing import TypeVar

import torch

from common.engine.config import EngineConfig
from common.models.config import ModelConfig
from common.startup.memory import estimate_memory, free_memory

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=EngineConfig)

#: The fraction of a GPU's free memory that an engine may take. Libraries allocate memory that no estimate counts.
GPU_SHARE = 0.9
#: The fraction of free memory that an engine with a default `max_seq_len` may take, beside the memory that it takes
#: with `SAFE_SEQ_LEN` in any case. Other programs need the rest, and on a GPU further seats.
CONTEXT_SHARE = 0.5
#: Tokens of a prefill chunk on a GPU, if the option was not given: enough to keep its multipliers busy, and vLLM's
#: default.
GPU_CHUNK = 2048

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
    """Return the options, with sizes for a GPU if there is one. Options that were given stay.

    On a GPU, a prefill chunk has `GPU_CHUNK` tokens. The sizes of the batch and of the KV memory are set by what
    fits into `GPU_SHARE` of its free memory (see `EngineConfig.for_gpu`).

    Args:
        config: its `max_seq_len` must not be None.
        model, dtype, device, weights: as for `estimate_memory`.
    """
    if device.type != "cuda":
        return config
    usable = GPU_SHARE * free_memory(device)
    assert config.max_seq_len is not None

    def fits(sized: EngineConfig) -> bool:
        return estimate_memory(sized, model, dtype, device, weights=weights).total <= usable

    return config.with_chunk(min(GPU_CHUNK, config.max_seq_len)).for_gpu(fits)


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
