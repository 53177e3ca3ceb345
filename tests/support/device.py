"""A GPU's stand-in: the meta device, whose tensors have no memory.

An operation that would wait for the device's numbers raises there. Copies from the host and launches are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

META = torch.device("meta")

MAKERS = (torch.tensor, torch.as_tensor, torch.from_numpy, Tensor.new_tensor)


class Copies(TorchFunctionMode):
    """Counts copies from the host to the device.

    Attributes:
        blocking: names of the calls that wait for the device.
        sent: number of copies that do not.
        bytes: total size of the copies that do not wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocking: list[str] = []
        self.sent = self.bytes = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in MAKERS and (func is Tensor.new_tensor or result.device.type != "cpu"):
            self.blocking.append(func.__name__)
        if func is Tensor.to and result.device.type != "cpu" and args[0].device.type == "cpu":
            if (kwargs or {}).get("non_blocking"):
                self.sent += 1
                self.bytes += args[0].nbytes
            else:
                self.blocking.append("to")
        return result


@contextmanager
def no_blocking_copies() -> Iterator[None]:
    with Copies() as copies:
        yield
    assert copies.blocking == []
