"""Small tensors on their way to a GPU: through pinned memory, and never by a copy that the host waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from common.request import Request, SamplingParams
from common.sampling import SamplingInputs, choose
from kernels.attention_layout import AttentionLayout
from kernels.transfer import to_device

META = torch.device("meta")  # stands in for a GPU: tensors without memory

BLOCKING = (torch.tensor, torch.as_tensor, torch.from_numpy, Tensor.new_tensor)


class BlockingCopies(TorchFunctionMode):
    """Notes the calls that would copy numbers from the host to a GPU and wait for that."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in BLOCKING and (func is Tensor.new_tensor or result.device.type != "cpu"):
            self.found.append(func.__name__)
        if func is Tensor.to and result.device.type != "cpu" and not (kwargs or {}).get("non_blocking"):
            self.found.append("to")
        return result


@contextmanager
def no_blocking_copies() -> Iterator[None]:
    with BlockingCopies() as copies:
        yield
    assert copies.found == []


@pytest.mark.parametrize("window", [None, 8])
def test_a_layouts_indices(window: int | None) -> None:
    tables = torch.arange(40).view(4, 10)
    layout = AttentionLayout(tables, torch.arange(4), 4, (1, 1, 6, 9), (7, 30, 20, 9), 2, META)
    with no_blocking_copies():
        assert layout.varlen(window).query_offsets.device == META
        assert layout.paged.lengths.device == META
        assert layout.positions.shape == layout.write_addresses.shape == (17,)
        assert len(layout.decode_groups(window)) > 0
        assert len(layout.prefill_segments(window)) == 2


def test_sampling() -> None:
    params = [
        SamplingParams(temperature=0.0, min_tokens=3),
        SamplingParams(top_p=0.9, repetition_penalty=1.2, logit_bias=((3, 1.0),)),
    ]
    requests = [Request(str(i), [0], each, frozenset([7])) for i, each in enumerate(params)]
    with no_blocking_copies():
        inputs = SamplingInputs.of(requests, None, 50, META)
        assert inputs.held_back is not None
        assert inputs.held_back.device == META
        inputs = SamplingInputs.of(requests, None, 50, torch.device("cpu"))
        choose(torch.zeros(2, 50), inputs)


def test_a_copy_to_a_gpu_is_pinned_and_not_waited_for() -> None:
    calls: list[tuple[Any, ...]] = []

    class Host:
        def pin_memory(self) -> Host:
            calls.append(("pin_memory",))
            return self

        def to(self, *arguments: Any, **named: Any) -> Host:
            calls.append((*arguments, named))
            return self

    cuda = torch.device("cuda")
    to_device(Host(), cuda)  # type: ignore[arg-type]  # a stand-in: pinning takes a GPU
    assert calls == [("pin_memory",), (cuda, {"non_blocking": True})]
    x = torch.ones(2)
    assert to_device(x, torch.device("cpu")) is x
