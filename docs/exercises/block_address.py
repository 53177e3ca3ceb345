"""Exercise: where does a column lie?"""

from __future__ import annotations

from collections.abc import Sequence


def address_of(column: int, table: Sequence[int], block_size: int) -> int:
    """The address of a sequence's column in the flat store.

    All blocks lie one after the other: block 0 has addresses 0 to block_size - 1, block 1 those after.

    Args:
        table: the sequence's blocks, in the order of its columns.
    """
    raise NotImplementedError("a block, and an offset in it")
