"""Copies small tensors from the host to a GPU without blocking the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device` without blocking the host.

    A copy to a GPU goes through pinned memory. A copy from pageable memory may wait until the device has done all
    earlier work, and so does `torch.tensor(..., device=...)`. torch reuses the pinned memory when the copy is done.
    """
    pinned = host.pin_memory() if device.type == "cuda" else host
    return pinned.to(device, non_blocking=True)


def indices_on(device: torch.device, values: Sequence[int]) -> Tensor:
    """Return integers as an int64 tensor on `device`, copied without blocking the host."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)
