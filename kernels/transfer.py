"""Copies small tensors from the host to a GPU without blocking the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 16  # bytes: the beginning of each tensor in a block


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device` without blocking the host. On a CPU, returns the same tensor.

    A copy to a GPU goes through pinned memory, which torch reuses when the copy is done. A copy from pageable
    memory, as in `torch.tensor(..., device=...)`, may block until the device has done all earlier work.
    """
    pinned = host.pin_memory() if device.type == "cuda" else host
    return pinned.to(device, non_blocking=True)


def move_together(hosts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors of any types to `device` in one block: one copy, without blocking the host.

    Returns views of the block, in the order of `hosts`. On a CPU: the same tensors.
    """
    if device.type == "cpu" or not hosts:
        return list(hosts)
    sizes = [each.numel() * each.itemsize for each in hosts]
    starts = [0, *itertools.accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
    block = torch.empty(starts.pop(), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for each, start, size in zip(hosts, starts, sizes, strict=True):
        block[start : start + size] = each.contiguous().view(-1).view(torch.uint8)
    moved = block.to(device, non_blocking=True)
    return [
        moved[start : start + size].view(each.dtype).view(each.shape)
        for each, start, size in zip(hosts, starts, sizes, strict=True)
    ]
