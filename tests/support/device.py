"""A GPU's stand-in: the meta device, whose tensors have no memory.

An operation that would wait for the device's numbers raises there. Copies from the host and launches are counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import common.models.layers
import common.sampling.draw
import kernels.attention
import kernels.decode_rows
import kernels.draw
import kernels.few_rows_linear
import kernels.gated_act
import kernels.paged_attention
import kernels.penalties
import kernels.rms_norm
import kernels.rope
import phase9_pipelined.runner
from common.devices.streams import Done, Pending, Stream
from kernels.tape import Function
from tests.support.graphs import StandIns

META = torch.device("meta")

MAKERS = (torch.tensor, torch.as_tensor, torch.from_numpy, Tensor.new_tensor)

#: Operators that launch nothing: they make views, or memory that nothing is written to. `_to_copy` is part of `to`.
VIEWS = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute", "select"),
    *("slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
    *("_unsafe_view", "reshape", "_to_copy"),
}


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


class Launches(TorchDispatchMode):
    """Counts the kernels that operators on the device launch, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0]
        outputs = result if isinstance(result, tuple | list) else (result,)
        on_device = any(isinstance(each, Tensor) and each.device == META for each in outputs)
        if on_device and name not in VIEWS:
            self.found[name] += 1
        return result


class Peak(TorchDispatchMode):
    """Measures the memory that the results of operators take on the device at once.

    Attributes:
        bytes: the largest amount so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._held: dict[int, tuple[int, list[weakref.ref[Tensor]]]] = {}  # by storage: its size, its tensors

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.device == META:
                storage = each.untyped_storage()
                self._held.setdefault(storage._cdata, (storage.nbytes(), []))[1].append(weakref.ref(each))
        self._held = {
            key: held for key, held in self._held.items() if any(ref() is not None for ref in held[1])
        }
        self.bytes = max(self.bytes, sum(size for size, _ in self._held.values()))
        return result


class Kernel:
    """Stands for a Triton kernel: counts its launches."""

    def __init__(self, name: str, found: Counter[str]) -> None:
        self._name, self._found = name, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self._found[self._name] += 1
        return lambda *arguments, **options: None


def use_kernels(monkeypatch: pytest.MonkeyPatch, found: Counter[str]) -> None:
    """Make every module choose Triton, and count launches instead of launching."""
    k = kernels
    layers, runner = common.models.layers, phase9_pipelined.runner
    for module in (k.attention, k.gated_act, k.rms_norm, k.rope, layers, common.sampling.draw, runner):
        monkeypatch.setattr(module, "use_triton", lambda _: True)
    monkeypatch.setattr(k.few_rows_linear, "takes", lambda x: x.shape[0] <= k.few_rows_linear.FEW_ROWS)
    for module in (
        *(
            k.paged_attention,
            k.gated_act,
            k.rms_norm,
            k.rope,
            k.draw,
            k.decode_rows,
            k.few_rows_linear,
            k.penalties,
        ),
    ):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Kernel(name, found))


class MetaStream(Stream):
    """Runs submitted work at once. Work by rows runs in stand-ins for graphs. Results on the host are zeros."""

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self.graphs = StandIns(sizes, to_device=lambda each: each.to(META, non_blocking=True))

    def submit(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
        after: Pending | None = None,
        *,
        fetch: bool = True,
        by_row: bool = False,
        rows: int | None = None,
    ) -> Pending:
        before = after.wait() if after is not None else ()
        with torch.inference_mode():
            outputs = self.graphs.run(key, function, inputs) if by_row else function(*before, *inputs)
        return Done(tuple(torch.zeros_like(each, device="cpu") for each in outputs) if fetch else outputs)

    def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def drain(self) -> None:
        pass
