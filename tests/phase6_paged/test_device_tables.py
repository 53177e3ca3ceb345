"""The copy of the block tables that a GPU has: only entries that have changed are sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import phase6_paged.cache
from kernels.transfer import move_together
from phase6_paged.cache import BlockTables

META = torch.device("meta")  # stands in for a GPU


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of entries in each copy that was sent."""
    counts: list[int] = []

    def noting(hosts: list[Tensor], device: torch.device) -> list[Tensor]:
        counts.append(len(hosts[0]))
        return move_together(hosts, device)

    monkeypatch.setattr(phase6_paged.cache, "move_together", noting)
    return counts


def test_the_devices_tables_follow_the_hosts(sent: list[int]) -> None:
    tables = BlockTables(3, 5, META)
    assert tables.on_device().dtype == torch.int32
    tables._on_device = torch.zeros(3, 5, dtype=torch.int32)  # with memory, so that the test can read it
    tables.write(0, 0, [7, 8, 9])
    tables.write(2, 1, [4])
    tables.write(0, 1, [6])  # overwritten before it is sent
    assert tables.on_device().tolist() == [[7, 6, 9, 0, 0], [0] * 5, [0, 4, 0, 0, 0]]
    tables.write(0, 3, [5])
    assert tables.on_device().tolist() == tables.tensor.tolist()
    assert tables.on_device().tolist() == tables.tensor.tolist()
    assert sent == [4, 1]  # without changes nothing is sent


def test_a_cpu_has_one_table(sent: list[int]) -> None:
    tables = BlockTables(2, 2, torch.device("cpu"))
    tables.write(1, 0, [3])
    assert tables.on_device() is tables.tensor
    assert sent == []
