"""Solution: the block's first address, and the offset in the block."""

from __future__ import annotations

from collections.abc import Sequence


def address_of(column: int, table: Sequence[int], block_size: int) -> int:
    return table[column // block_size] * block_size + column % block_size
