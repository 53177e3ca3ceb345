"""Reads quantized checkpoints in the `compressed-tensors` format, if our int8 kernels can compute with the weights.

The weights must have 8 bits, and be symmetric, with one factor for each output. The format stores them in two ways:

```text
int-quantized     weight         int8  [N, K]                      weight_scale [N, 1]
pack-quantized    weight_packed  int32 [N, ceil(K / 4)]            weight_scale [N, 1]    weight_shape [2]: N, K
                  four weights a number, the lowest bits first, each with 128 added
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from common.errors import StartupError

FORMATS = ("int-quantized", "pack-quantized")

#: Entries of a group's `weights`, and the values that our kernels can compute with.
_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("int", None),
    "symmetric": (True, None),
    "strategy": ("channel",),
    "dynamic": (False, None),
}

#: Endings of the names of tensors that the model has no place for. A symmetric scheme's zero points are zero.
_UNUSED = (".weight_zero_point", ".weight_shape", ".input_scale", ".input_zero_point", ".weight_g_idx")


class Stored(Protocol):
    """A tensor on disk, in any format."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_into(self, target: Tensor) -> None:
        """Read the tensor into `target`, which has the same shape, and convert it to the type of `target`."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's weights are quantized.

    Attributes:
        quantizes_activations: whether the checkpoint asks for quantized activations as well. We do not quantize
            them.
    """

    quantizes_activations: bool


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Read the `quantization_config` of a `config.json`, or return None if there is none.

    Raises:
        StartupError: the weights are quantized in a way that is not implemented. The message names it.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method != "compressed-tensors":
        named = str(method or "by a method it does not name")
        raise StartupError(
            f"quantization_config: the weights are quantized ({named:.80}), and only compressed-tensors with 8-bit "
            "weights is run: take the checkpoint that this one was made from"
        )
    if (stored := quantization.get("format")) not in FORMATS:
        raise _refused("format", stored, " or ".join(FORMATS))
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise _refused("config_groups", groups, "groups by name")
    for group in groups.values():
        weights = group.get("weights")
        for key, values in _WEIGHTS.items():
            if not isinstance(weights, Mapping) or weights.get(key) not in values:
                found = weights.get(key) if isinstance(weights, Mapping) else weights
                raise _refused(f"weights.{key}", found, f"{values[0]!r}")
        if group.get("targets") != ["Linear"]:
            raise _refused("targets", group.get("targets"), "['Linear']")
    if quantization.get("kv_cache_scheme") is not None:
        raise _refused("kv_cache_scheme", "a scheme", "none: keys and values are not quantized")
    sparsity = quantization.get("sparsity_config") or {"format": "dense"}
    found = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if found != "dense":
        raise _refused("sparsity_config.format", found, "dense")
    return Scheme(any(group.get("input_activations") is not None for group in groups.values()))


def _refused(key: str, found: Any, run: str) -> StartupError:
    return StartupError(
        f"quantization_config: compressed-tensors with {key} = {found!r:.80} is not run, only {run}"
    )


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """An int8 matrix that is stored with four weights in each number (`pack-quantized`)."""

    stored: Stored
    shape: tuple[int, ...]

    def read_into(self, target: Tensor) -> None:
        numbers = torch.empty(self.stored.shape, dtype=torch.int32)
        self.stored.read_into(numbers)
        shifted = numbers.view(torch.uint8)[:, : self.shape[1]]
        target.copy_((shifted ^ 0x80).view(torch.int8))  # 128 less, as bits


def plain_names(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return a checkpoint's tensors with the names that `int-quantized` gives them, in the same order.

    A packed matrix becomes a `PackedInt8`. Tensors that the model has no place for are left out.

    Raises:
        StartupError: a packed matrix contradicts its `weight_shape`.
    """
    found: dict[str, Stored] = {}
    for name, tensor in stored.items():
        if name.endswith(_UNUSED):
            continue
        if not name.endswith(".weight_packed"):
            found[name] = tensor
            continue
        stem = name.removesuffix("_packed")
        shape = (0, 0)
        if (entry := stored.get(f"{stem}_shape")) is not None and entry.shape == (2,):
            sizes = torch.empty(2, dtype=torch.int64)
            entry.read_into(sizes)
            shape = (int(sizes[0]), int(sizes[1]))
        if tensor.shape != (shape[0], -(-shape[1] // 4)):
            raise StartupError(
                f"{name} is {list(tensor.shape)}, which its weight_shape {list(shape)} is not in fours"
            )
        found[stem] = PackedInt8(tensor, shape)
    return found
