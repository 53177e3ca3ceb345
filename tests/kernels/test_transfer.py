"""Copies of small tensors to a GPU: through pinned memory, and without blocking the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.transfer import move_together

META = torch.device("meta")


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
