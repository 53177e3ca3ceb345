"""Estimates the memory that an engine takes, and checks that so much is free before the weights are read.

```text
weights + KV cache + activations of the widest pass + logits and sampling + captured graphs  <=  free memory
```
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from common.engine.config import EngineConfig
from common.errors import StartupError
from common.models.config import ModelConfig
from common.startup.control_groups import control_groups
from kernels.dispatch import kernels_on
from kernels.paged_attention import SPLIT_COLUMNS

logger = logging.getLogger(__name__)

#: Bytes of a logit and of its share of sampling's tensors: float32 scores, sorted indices (int64), float64 sums.
#: Measured with every filter on: 60 to 71 bytes a logit, depending on the allocator's fragmentation; 40 with a
#: temperature alone.
SAMPLING_BYTES_PER_LOGIT = 72
#: The same bytes on a GPU with Triton, where kernels draw without a sort (`kernels.draw`). With biases, penalties,
#: masks and log-probabilities, tensors of 20 bytes a logit exist at once. Phases 9 and 10 also keep a count of 4
#: bytes for each sequence and token (`kernels.penalties`). With filters only, there are the logits, of 4
#: bytes, and the sums of searches, of 60 KB a row.
DRAWN_BYTES_PER_LOGIT = 24
#: Memory that libraries keep: weights packed for a product, products compiled for a size. Measured on a CPU: 60 to
#: 110 MB, whatever the pass.
LIBRARY_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The most memory that an engine takes, part by part, in bytes."""

    weights: int
    kv_cache: int
    activations: int
    sampling: int
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.sampling + self.graphs


def estimate_memory(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, *, weights: int
) -> MemoryEstimate:
    """Estimate the most memory that an engine takes.

    Args:
        config: its `max_seq_len` must not be None.
        model: the model's shape.
        dtype: the type of weights and activations.
        device: the model's device.
        weights: bytes that the weights will take; 0 if they are loaded already.
    """
    kv_cache = config.kv_tokens() * model.kv_shape(dtype).bytes_per_token
    per_token = _activation_bytes_per_token(model, dtype, device)
    per_logit = DRAWN_BYTES_PER_LOGIT if kernels_on(device) == "triton" else SAMPLING_BYTES_PER_LOGIT
    # Graphs share the scratch memory of the largest graph, with logits and scores for penalties, and a buffer to
    # which they copy the logits. All three are float32.
    graphs = 0
    if device.type == "cuda":
        # Partial results of a decoding sequence's splits, in float32 (kernels.paged_attention), in one layer.
        assert config.max_seq_len is not None, "it is resolved"
        splits = -(-config.max_seq_len // SPLIT_COLUMNS)
        split_bytes = model.num_heads * splits * (model.head_dim + 2) * 4
        attention = config.max_sampled_rows() * split_bytes
        rows = max(config.captured_sizes(), default=0)
        graphs = rows * (per_token + split_bytes + 3 * 4 * model.vocab_size)
    else:
        # Without native kernels, the keys and values of one layer are gathered. A quarter is added as a margin.
        attention = kv_cache // model.num_layers * 5 // 4
    return MemoryEstimate(
        weights=weights,
        kv_cache=kv_cache,
        activations=config.max_pass_tokens() * per_token + attention + LIBRARY_BYTES,
        sampling=config.max_sampled_rows() * model.vocab_size * per_logit,
        graphs=graphs,
    )


def _activation_bytes_per_token(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes that a pass holds at once for each of its tokens, in the widest part of a layer.

    Four tensors of hidden size are held around a norm: a layer's output, the normed sum, and in float32 the
    residual stream before and after the addition. Beside them are either the MLP's gate, up and their product, or
    four copies of queries, keys and values.
    """
    attention_width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    width = 2 * model.hidden_size + max(3 * model.intermediate_size, 4 * attention_width)
    # On a CPU, norms and products of smaller types are computed in float32.
    itemsize = dtype.itemsize if device.type == "cuda" else 4
    return width * itemsize + 2 * 4 * model.hidden_size


def check_memory(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    weights: int,
) -> None:
    """Log the memory estimate of an engine, and compare it with the memory that is free.

    Args:
        config, model, dtype, device, weights: as for `estimate_memory`.

    Raises:
        StartupError: the engine needs more memory than is free.
    """
    estimate = estimate_memory(config, model, dtype, device, weights=weights)
    free = free_memory(device)
    parts = {
        "weights": estimate.weights,
        f"KV cache ({config.kv_formula()} tokens)": estimate.kv_cache,
        f"activations ({config.max_pass_tokens()} tokens in a pass)": estimate.activations,
        f"logits and sampling ({config.max_sampled_rows()} rows)": estimate.sampling,
        f"captured graphs ({max(config.captured_sizes(), default=0)} rows)": estimate.graphs,
    }
    account = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    account += f" = {format_bytes(estimate.total)}"
    available = f"{format_bytes(free)} are free on {device}"
    logger.info("memory at the most: %s; %s", account, available)
    if estimate.weights > free:
        raise StartupError(
            f"{account}, but only {available}: the weights alone do not fit; take a smaller model, "
            "or a --dtype of fewer bytes"
        )
    if estimate.total > free:
        raise StartupError(f"{account}, but only {available}: {config.kv_advice()}")


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        # Memory that torch has reserved and not allocated is free for this process only.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = int(psutil.virtual_memory().available)
    allowed = control_group_room()
    return available if allowed is None else min(available, allowed)


class _ControlGroupFiles(NamedTuple):
    """The file names in a control group's folder, which differ between the two versions of control groups."""

    limit: str
    usage: str
    reclaimable: tuple[str, str]  # entries of memory.stat


_VERSION_1 = _ControlGroupFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_VERSION_2 = _ControlGroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))


def control_group_room(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still allocate within its Linux control groups (a container's limit).

    Each group around the process has its own limit, and the group with the least left decides.

    Args:
        root: the folder that holds `proc` and `sys`.

    Returns:
        The bytes; None if there is no limit, or no group's files can be read. (Without a limit, version 1 of
        control groups writes a huge number. Then the result is huge, too.)
    """
    rooms = [
        _room_in(group, _VERSION_1 if version == 1 else _VERSION_2)
        for version, group in control_groups("memory", root)
    ]
    return min((room for room in rooms if room is not None), default=None)


def _room_in(group: Path, files: _ControlGroupFiles) -> int | None:
    """Return a group's limit minus its usage, at least 0; None if the group has no limit or cannot be read.

    File pages do not count as used: the kernel drops them before an allocation fails. After a checkpoint was read
    twice, its pages are active ones.
    """
    try:
        limit = (group / files.limit).read_text().strip()
        usage = int((group / files.usage).read_text())
        stat = (group / "memory.stat").read_text()
    except OSError:  # a group without the memory controller, or not visible in this container
        return None
    if limit == "max":
        return None
    entries = dict(line.split() for line in stat.splitlines())
    reclaimable = sum(int(entries.get(name, 0)) for name in files.reclaimable)
    return max(0, int(limit) - usage + reclaimable)


def format_bytes(count: int) -> str:
    """Return a size as text, in GB of 2**30 bytes or MB of 2**20."""
    return f"{count / 2**30:.1f} GB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MB"
