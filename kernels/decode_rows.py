"""Gathers the inputs of a decode step from the state that a GPU holds for each seat (place in the batch).

```text
seats of the step          3          0          5          sent only if the seats that decode change
latest[seat]               token      token      token      written by the step before
positions[seat]            17         204        9          written by the step before
block_tables[seat]         [7|2|…]    [4|0|…]    [9|…]      entries are sent when blocks are allocated
                             └─ address of column 17: block 2, offset 1, if blocks have 16 columns
```
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import HAS_TRITON, device_guard
from kernels.overlap import early_launch

if HAS_TRITON:
    import triton
    import triton.language as tl

    from kernels.overlap import wait_for_inputs

#: Sequences whose inputs one program gathers.
TILE = 128


class DecodeRows(NamedTuple):
    """The inputs of a pass that computes one token of each of B sequences.

    Attributes:
        token_ids: [B] int64.
        positions: [B] int64, each token's column in its own sequence.
        addresses: [B] int64, rows of the KV stores seen as [blocks * block_size, ...].
        tiles: [B, 3] int32, for each sequence its seat, its index in this pass, and 1: see
            `kernels.attention_layout.PagedIndices`.
    """

    token_ids: Tensor
    positions: Tensor
    addresses: Tensor
    tiles: Tensor


def decode_rows_reference(
    seats: Tensor, latest: Tensor, positions: Tensor, tables: Tensor, block_size: int
) -> DecodeRows:
    """Compute `decode_rows_triton` in torch, with the same arguments and result. For reading and for tests."""
    columns = positions[seats]
    addresses = tables[seats, columns // block_size].long() * block_size + columns % block_size
    each = torch.arange(len(seats), device=seats.device)
    tiles = torch.stack([seats, each, torch.ones_like(each)], dim=1).int()
    return DecodeRows(latest[seats], columns, addresses, tiles)


if HAS_TRITON:

    @triton.jit(do_not_specialize=["count", "block_size", "table_stride"])  # type: ignore[untyped-decorator]  # Triton has no types
    def _decode_rows_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        seats_ptr,
        latest_ptr,
        positions_ptr,
        tables_ptr,
        token_ids_ptr,
        columns_ptr,
        addresses_ptr,
        tiles_ptr,
        count,
        block_size,
        table_stride,
        tile: tl.constexpr,
        early: tl.constexpr,
    ):
        """Program i reads a tile of rows."""
        wait_for_inputs(early)
        rows = tl.program_id(0) * tile + tl.arange(0, tile)
        mask = rows < count
        seats = tl.load(seats_ptr + rows, mask=mask, other=0)
        columns = tl.load(positions_ptr + seats, mask=mask, other=0)
        block = tl.load(tables_ptr + seats * table_stride + columns // block_size, mask=mask, other=0)
        tl.store(token_ids_ptr + rows, tl.load(latest_ptr + seats, mask=mask, other=0), mask=mask)
        tl.store(columns_ptr + rows, columns, mask=mask)
        tl.store(addresses_ptr + rows, block.to(tl.int64) * block_size + columns % block_size, mask=mask)
        tl.store(tiles_ptr + 3 * rows, seats.to(tl.int32), mask=mask)
        tl.store(tiles_ptr + 3 * rows + 1, rows, mask=mask)
        tl.store(tiles_ptr + 3 * rows + 2, tl.full([tile], 1, tl.int32), mask=mask)


def decode_rows_triton(
    seats: Tensor, latest: Tensor, positions: Tensor, tables: Tensor, block_size: int
) -> DecodeRows:
    """Gather the inputs of a decode step, in one launch. Nothing here waits for the device.

    Args:
        seats: [B] int64, the seats that decode. A seat is a sequence's place in the batch.
        latest: [seats] int64, the latest token of each seat.
        positions: [seats] int64, the column of each seat's latest token.
        tables: [seats, N] int32 or int64, each seat's blocks, then any valid blocks.
        block_size: columns in a block.
    """
    count, device = len(seats), seats.device
    # Separate allocations: Triton compiles another kernel for addresses that are not multiples of 16.
    token_ids, columns, addresses = (torch.empty_like(seats) for _ in range(3))
    tiles = torch.empty(count, 3, dtype=torch.int32, device=device)
    rows = DecodeRows(token_ids, columns, addresses, tiles)
    with device_guard(seats):
        _decode_rows_kernel[(triton.cdiv(count, TILE),)](
            seats,
            latest,
            positions,
            tables,
            *rows,
            count,
            block_size,
            tables.stride(0),
            tile=TILE,
            **early_launch(seats.device),
        )
    return rows
