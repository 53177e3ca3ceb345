"""Copies of small tensors to a GPU: through pinned memory, and without blocking the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from common.request import Request, SamplingParams
from common.sampling.draw import choose
from common.sampling.inputs import SamplingInputs
from kernels.attention_layout import AttentionLayout
from kernels.transfer import move_together, to_device
from tests.support.device import META, no_blocking_copies


@pytest.mark.parametrize("window", [None, 8])
def test_a_layouts_indices(window: int | None) -> None:
    tables = torch.arange(40).view(4, 10)
    layout = AttentionLayout(tables, torch.arange(4), 4, (1, 1, 6, 9), (7, 30, 20, 9), 2, META)
    with no_blocking_copies():
        assert layout.paged(4).tiles.device == META
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


def test_tensors_of_any_types_go_in_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [
        torch.tensor([5, -6]),
        torch.tensor([[1, 2, 3]], dtype=torch.int32).T,
        torch.zeros(0, 3),
        torch.tensor([0.5], dtype=torch.float64),
    ]
    assert move_together(hosts, torch.device("cpu")) == hosts
    blocks: list[Tensor] = []
    move = Tensor.to

    def onto_itself(block: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        assert non_blocking
        blocks.append(block)
        return move(block, "cpu", copy=True)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", onto_itself)
        moved = move_together(hosts, META)
    assert len(blocks) == 1
    assert all(each.data_ptr() % 16 == 0 for each in moved)
    for each, host in zip(moved, hosts, strict=True):
        assert each.dtype == host.dtype
        assert torch.equal(each, host)
