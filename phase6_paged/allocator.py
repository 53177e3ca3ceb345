"""Tracks free blocks and the owners of allocated blocks: ids only, no tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class OutOfBlocksError(RuntimeError):
    """Fewer blocks are free than were requested."""


class BlockAllocator(Generic[Owner]):
    """Allocates block ids 0 to `num_blocks` - 1. Every operation is O(1) per block.

    The block freed last is allocated first: its bytes may still be in a CPU cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._owners: dict[int, Owner] = {}

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_allocated(self) -> int:
        """Number of blocks that have an owner."""
        return len(self._owners)

    def can_allocate(self, count: int) -> bool:
        return count <= self.num_free

    def allocate(self, count: int, owner: Owner) -> list[int]:
        """Allocate `count` blocks for `owner`, all or none. Returns their ids.

        Raises:
            OutOfBlocksError: fewer blocks are free; nothing has changed.
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if not self.can_allocate(count):
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} are free")
        blocks = [self._free.pop() for _ in range(count)]
        self._owners |= dict.fromkeys(blocks, owner)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Free blocks.

        Raises:
            ValueError: a block is not allocated, or is named twice; nothing has changed.
        """
        blocks = list(blocks)
        wrong = [block for block in blocks if block not in self._owners]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {wrong or blocks} are not allocated, or named twice")
        self.force_free(blocks)

    def force_free(self, blocks: Iterable[int]) -> int:
        """Free the blocks among `blocks` that are allocated, and ignore the others. Returns their number."""
        held = [block for block in dict.fromkeys(blocks) if block in self._owners]
        for block in held:
            del self._owners[block]
        self._free += held
        return len(held)

    def clear(self) -> None:
        """Free all blocks of all owners."""
        self._free = list(reversed(range(self.num_blocks)))
        self._owners.clear()

    # ------------------------------------------------------------------ audits

    def allocated_block_ids(self) -> set[int]:
        """Return a copy of the set of allocated ids."""
        return set(self._owners)

    def find_leaked_blocks(self, active_owners: Iterable[Owner]) -> dict[Owner, set[int]]:
        """Return, for each owner of blocks that is not among `active_owners`, the ids of its blocks."""
        active = set(active_owners)
        leaked: dict[Owner, set[int]] = defaultdict(set)
        for block, owner in self._owners.items():
            if owner not in active:
                leaked[owner].add(block)
        return dict(leaked)

    def find_unreferenced_blocks(self, referenced: Iterable[int]) -> set[int]:
        """Return the allocated blocks that are not among `referenced`."""
        return self.allocated_block_ids() - set(referenced)
