"""The rows of a decode step, read on the device, against torch."""

from __future__ import annotations

import pytest
import torch

from kernels.decode_rows import TILE, decode_rows_reference, decode_rows_triton


@pytest.mark.parametrize("count", [1, 5, TILE, TILE + 3])
@pytest.mark.parametrize("block_size", [1, 16, 100])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_of_seats(triton_device: str, count: int, block_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    held, blocks = count + 7, 9

    def draw(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=generator).to(triton_device)

    tables = draw(10_000, held, blocks).to(dtype)
    latest, positions = draw(50_000, held), draw(blocks * block_size, held)
    seats = torch.randperm(held, generator=generator)[:count].to(triton_device)
    given = seats, latest, positions, tables, block_size
    for actual, expected in zip(decode_rows_triton(*given), decode_rows_reference(*given), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
