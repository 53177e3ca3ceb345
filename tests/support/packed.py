"""Writes quantized checkpoints by the descriptions of their formats: compressed-tensors, GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models import read_config, write_config

WEIGHTS = "model.safetensors"


class Kind(NamedTuple):
    """How a checkpoint is quantized. `group` -1: a whole row. `in_order`: groups lie one after the other."""

    bits: int = 4
    group: int = 128
    symmetric: bool = False
    in_order: bool = True


class Quantized(NamedTuple):
    """A matrix [N, K]: q, scales [N, G], zero points [N, G], and the group of each input [K]."""

    q: NDArray[np.int64]
    scales: NDArray[np.float32]
    zeros: NDArray[np.int64]
    group_of: NDArray[np.int64]

    def dequantized(self) -> Tensor:
        places = self.group_of
        return torch.from_numpy(self.scales[:, places] * (self.q - self.zeros[:, places]).astype(np.float32))


def quantize(weight: NDArray[np.float32], kind: Kind, order: NDArray[np.int64]) -> Quantized:
    """Round to nearest. If groups are not in order, input i is in the group of `order[i]`."""
    inputs = weight.shape[1]
    size = inputs if kind.group < 0 else kind.group
    group_of = (np.arange(inputs) if kind.in_order else order) // size
    members = [np.flatnonzero(group_of == group) for group in range(inputs // size)]
    largest, middle = 2**kind.bits - 1, 2 ** (kind.bits - 1)
    lowest = np.stack([weight[:, each].min(1) for each in members], 1).clip(max=0)
    highest = np.stack([weight[:, each].max(1) for each in members], 1).clip(min=0)
    if kind.symmetric:
        scales = np.maximum(-lowest, highest) / (middle - 1)
        zeros = np.full(scales.shape, middle)
    else:
        scales = (highest - lowest) / largest
        zeros = np.rint(-lowest / scales).astype(np.int64)
    # Eight significant bits, as a bfloat16 has.
    scales = torch.from_numpy(scales).bfloat16().float().numpy()
    q = np.rint(weight / scales[:, group_of]).astype(np.int64) + zeros[:, group_of]
    q[0, 0] = 0  # the formats allow the lowest number, symmetric rounding does not make it
    return Quantized(q.clip(0, largest), scales, zeros, group_of)


def pack(values: NDArray[np.int64], bits: int) -> Tensor:
    """[n, m] -> [n, ceil(m * bits / 32)] int32, the lowest bits first."""
    count = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % count))).reshape(len(values), -1, count)
    total = sum(padded[:, :, i].astype(np.uint64) << np.uint64(bits * i) for i in range(count))
    return torch.from_numpy(total.astype(np.uint32).view(np.int32).copy())


def as_gptq(own: Quantized, kind: Kind, subtracted: int) -> dict[str, Tensor]:
    zeros = (own.zeros - subtracted) % 2**kind.bits
    return {
        "qweight": pack(own.q, kind.bits).T.contiguous(),
        "qzeros": pack(zeros.T, kind.bits),
        "scales": torch.from_numpy(own.scales.T).half().contiguous(),
        "g_idx": torch.from_numpy(own.group_of).int(),
    }


def as_awq(own: Quantized, kind: Kind) -> dict[str, Tensor]:
    def packed(values: NDArray[np.int64]) -> Tensor:
        """[m, N] -> [m, N / 8]."""
        return pack(
            values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape), 4
        )

    assert kind.bits == 4
    return {
        "qweight": packed(own.q.T),
        "qzeros": packed(own.zeros.T),
        "scales": torch.from_numpy(own.scales.T).half().contiguous(),
    }


def as_compressed(own: Quantized, kind: Kind, plain_zeros: bool = False) -> dict[str, Tensor]:
    middle = 2 ** (kind.bits - 1)
    zeros = torch.from_numpy(own.zeros - middle).to(torch.int8)
    found = {
        "weight_packed": pack(own.q, kind.bits),
        "weight_scale": torch.from_numpy(own.scales).bfloat16(),
        "weight_shape": torch.tensor(own.q.shape),
    }
    if not kind.in_order:
        found["weight_g_idx"] = torch.from_numpy(own.group_of).int()
    if not kind.symmetric:
        found["weight_zero_point"] = zeros if plain_zeros else pack(own.zeros.T, kind.bits).T.contiguous()
    return found


def as_integers(own: Quantized, kind: Kind) -> dict[str, Tensor]:
    middle = 2 ** (kind.bits - 1)
    return {
        "weight": torch.from_numpy(own.q - middle).to(torch.int8),
        "weight_scale": torch.from_numpy(own.scales).bfloat16(),
    }


def compressed_config(
    kind: Kind, form: str = "pack-quantized", *, weights: Mapping[str, Any] = {}, **changes: Any
) -> dict[str, Any]:
    """Return a compressed-tensors entry of config.json. `weights`: changes to its scheme of weights."""
    scheme = {
        "num_bits": kind.bits,
        "type": "int",
        "symmetric": kind.symmetric,
        "dynamic": False,
        "strategy": "channel" if kind.group < 0 else "group",
        "group_size": kind.group,
        "observer": "minmax",
        "actorder": None if kind.in_order else "group",
        "block_structure": None,
        "observer_kwargs": {},
        **weights,
    }
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        **changes,
    }


def gptq_config(kind: Kind, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": kind.bits,
        "group_size": kind.group,
        "sym": kind.symmetric,
        "desc_act": not kind.in_order,
        "damp_percent": 0.01,
        "true_sequential": True,
        "static_groups": False,
        "model_name_or_path": None,
        "model_file_base_name": None,
        **changes,
    }


def awq_config(kind: Kind, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": kind.bits,
        "group_size": kind.group,
        "zero_point": not kind.symmetric,
        "version": "gemm",
        "modules_to_not_convert": None,
        **changes,
    }


class Format(NamedTuple):
    config: Callable[..., dict[str, Any]]
    tensors: Callable[[Quantized, Kind], dict[str, Tensor]]


FORMATS = {
    "gptq": Format(gptq_config, lambda own, kind: as_gptq(own, kind, 1)),
    "gptq_v2": Format(
        lambda kind: gptq_config(kind, checkpoint_format="gptq_v2"), lambda own, kind: as_gptq(own, kind, 0)
    ),
    "awq": Format(awq_config, as_awq),
    "compressed": Format(compressed_config, as_compressed),
    "compressed, plain zeros": Format(
        compressed_config, lambda own, kind: as_compressed(own, kind, plain_zeros=True)
    ),
    "integers": Format(lambda kind: compressed_config(kind, "int-quantized"), as_integers),
}


def quantize_folder(
    plain: Path,
    quantized: Path,
    name: str,
    kind: Kind,
    *,
    only: str = "proj.weight",
    orders: Callable[[str], int] = lambda _: 0,
) -> dict[str, Tensor]:
    """Write a checkpoint in quantized form. Returns the numbers that it stands for, by their names.

    Args:
        plain: the checkpoint's folder. It has one file of weights.
        quantized: where the new checkpoint goes.
        only: the ending of the names of matrices that are quantized.
        orders: takes a matrix's name, and returns the seed of its order of inputs.
    """
    stored = load_file(plain / WEIGHTS)
    found: dict[str, Tensor] = {}
    for tensor_name, tensor in stored.items():
        if not tensor_name.endswith(only):
            found[tensor_name] = tensor
            continue
        order = np.random.default_rng(orders(tensor_name)).permutation(tensor.shape[1])
        own = quantize(tensor.float().numpy(), kind, order)
        stored[tensor_name] = own.dequantized()
        stem = tensor_name.removesuffix(".weight")
        found |= {f"{stem}.{each}": part for each, part in FORMATS[name].tensors(own, kind).items()}
    quantized.mkdir()
    save_file(found, quantized / WEIGHTS)
    write_config(quantized, read_config(plain) | {"quantization_config": FORMATS[name].config(kind)})
    return stored
