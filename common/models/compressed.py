"""Reads how a Hugging Face folder's weights are quantized: the `quantization_config` of its `config.json`.

Three methods are read: `compressed-tensors`, `gptq` and `awq`, with weights of 4 or 8 bits. The bits, groups and
zero points of each matrix follow from its tensors (`common.models.packed`). This module refuses settings that the
tensors do not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import StartupError

BITS = (4, 8)

FORMATS = ("int-quantized", "pack-quantized")

#: Entries of a group's `weights` in compressed-tensors, and the values that are read.
_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": BITS,
    "type": ("int", None),
    "strategy": ("channel", "group"),
    "dynamic": (False, None),
}

#: The same for whole configs. Names of older files follow those of newer ones.
_GPTQ: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("bits",): BITS,
    ("checkpoint_format",): ("gptq", "gptq_v2", None),
    ("is_marlin_format",): (False, None),
    ("pack_dtype",): ("int32", None),
    ("adapter",): ({}, None),
}
_AWQ: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("bits", "w_bit"): (4,),
    ("version",): ("gemm", "GEMM", None),
    ("checkpoint_format",): ("gemm", None),
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's weights are quantized.

    Attributes:
        method: `compressed-tensors`, `gptq` or `awq`.
        quantizes_activations: whether the checkpoint asks for quantized activations as well. We do not quantize
            them.
        zero_offset: the number that was subtracted from a zero point when it was stored.
    """

    method: str
    quantizes_activations: bool = False
    zero_offset: int = 0

    @property
    def title(self) -> str:
        """The method's name, for messages."""
        return self.method if self.method == "compressed-tensors" else self.method.upper()


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Read the `quantization_config` of a `config.json`, or return None if there is none.

    Raises:
        StartupError: the weights are quantized in a way that is not implemented. The message names it.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method not in _READERS:
        named = str(method or "by a method it does not name")
        raise StartupError(
            f"quantization_config: the weights are quantized ({named:.80}), and only {', '.join(_READERS)} are "
            "run: take the checkpoint that this one was made from"
        )
    return _READERS[method](quantization)


def _read_compressed(quantization: Mapping[str, Any]) -> Scheme:
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise _refused("compressed-tensors", "config_groups", groups, "groups by name")
    mixed = quantization.get("format") == "mixed-precision"  # each group has a format of its own
    formats = [group.get("format") for group in groups.values()] if mixed else [quantization.get("format")]
    for form in formats:
        if form not in FORMATS:
            raise _refused("compressed-tensors", "format", form, " or ".join(FORMATS))
    for group in groups.values():
        weights = group.get("weights")
        for key, values in _WEIGHTS.items():
            if not isinstance(weights, Mapping) or weights.get(key) not in values:
                found = weights.get(key) if isinstance(weights, Mapping) else weights
                raise _refused("compressed-tensors", f"weights.{key}", found, _either(values))
    if quantization.get("kv_cache_scheme") is not None:
        raise _refused(
            "compressed-tensors", "kv_cache_scheme", "a scheme", "none: keys and values are not quantized"
        )
    if quantization.get("transform_config"):
        raise _refused("compressed-tensors", "transform_config", "a transform", "none")
    sparsity = quantization.get("sparsity_config") or {"format": "dense"}
    found = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if found != "dense":
        raise _refused("compressed-tensors", "sparsity_config.format", found, "dense")
    activations = any(group.get("input_activations") is not None for group in groups.values())
    return Scheme("compressed-tensors", quantizes_activations=activations)


def _read_gptq(quantization: Mapping[str, Any]) -> Scheme:
    _check("gptq", quantization, _GPTQ)
    return Scheme("gptq", zero_offset=0 if quantization.get("checkpoint_format") == "gptq_v2" else 1)


def _read_awq(quantization: Mapping[str, Any]) -> Scheme:
    _check("awq", quantization, _AWQ)
    return Scheme("awq")


_READERS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "compressed-tensors": _read_compressed,
    "gptq": _read_gptq,
    "awq": _read_awq,
}


def _check(
    method: str, quantization: Mapping[str, Any], entries: Mapping[tuple[str, ...], tuple[Any, ...]]
) -> None:
    """Raise StartupError if an entry has a value that is not read. An absent entry has the value None."""
    for names, values in entries.items():
        key = next((name for name in names if name in quantization), names[0])
        if quantization.get(key) not in values:
            raise _refused(method, key, quantization.get(key), _either(values))


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values if value is not None)


def _refused(method: str, key: str, found: Any, run: str) -> StartupError:
    return StartupError(f"quantization_config: {method} with {key} = {found!r:.80} is not run, only {run}")
