"""Bringing small tensors from the host to a GPU without making the host wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device` without blocking the host.

    To a GPU it goes through pinned memory: a copy from pageable memory may wait until the device has done all work
    before it, and so does `torch.tensor(..., device=...)`. torch gives the pinned memory out again when the copy is
    done.
    """
    pinned = host.pin_memory() if device.type == "cuda" else host
    return pinned.to(device, non_blocking=True)
