"""KV memory in small blocks (Kwon et al. 2023, PagedAttention).

```text
block size 4                       block table        physical blocks
  A  tokens 0-9, three blocks      A  5 0 7           0  A4 A5 A6 A7     4  ·  ·  ·  ·
  B  tokens 0-4, two blocks        B  2 3             1  ·  ·  ·  ·      5  A0 A1 A2 A3
                                                      2  B0 B1 B2 B3     6  ·  ·  ·  ·
  column c of A is in block table[c // 4]             3  B4 ·  ·  ·      7  A8 A9 ·  ·
  at offset c % 4
```

A sequence holds the blocks it uses now. Blocks that it will need later are free for other sequences until then.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from common.kv import KVPool, KVShape
from common.request import Request
from kernels.transfer import move_together
from phase5_continuous.cache import SlottedKVCache
from phase6_paged.allocator import BlockAllocator
from phase6_paged.config import Config

logger = logging.getLogger(__name__)


class BlockTables:
    """The block tables of all sequences, as rows of one tensor that shares memory with a Python array.

    Writing a block id is as fast as a list's append. Making a new tensor of all tables in each step would take
    longer than the rest of the step's host work. A GPU has a copy of the tensor, and the host sends it only the
    entries that have changed.

    Attributes:
        tensor: [seats, blocks] int64, on the host. Row s begins with the blocks of the sequence at seat s.
    """

    def __init__(self, seats: int, blocks: int, device: torch.device) -> None:
        self._width = blocks
        self._ids = array("q", bytes(8 * seats * blocks))
        self._free = list(reversed(range(seats)))
        self.tensor = torch.frombuffer(self._ids, dtype=torch.int64).view(seats, blocks)
        self._on_device = self.tensor  # [seats, blocks], int32 on a GPU
        if device.type != "cpu":
            self._on_device = torch.zeros(seats, blocks, dtype=torch.int32, device=device)
        self._changed: set[int] = set()  # entries of the flat tensor that the device's copy lacks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_seat(self) -> int:
        """Take a free seat, a row of the tensor. Returns its index. IndexError: no seat is free."""
        return self._free.pop()

    def free_seat(self, seat: int) -> None:
        self._free.append(seat)

    def clear(self) -> None:
        """Free all seats."""
        self._free = list(reversed(range(len(self.tensor))))

    def write(self, seat: int, first: int, blocks: Sequence[int]) -> None:
        """Write block ids into a seat's row, from entry `first` on."""
        at = seat * self._width + first
        self._ids[at : at + len(blocks)] = array("q", blocks)
        if self._on_device is not self.tensor:
            self._changed.update(range(at, at + len(blocks)))

    def on_device(self) -> Tensor:
        """Send changed entries to the device, and return the device's copy [seats, blocks]; on a CPU, `tensor`.

        Work that is submitted from now on reads the new entries.
        """
        if self._changed:
            entries = torch.tensor(list(self._changed))
            sent = move_together([entries, self.tensor.view(-1)[entries].int()], self._on_device.device)
            self._on_device.view(-1).index_copy_(0, *sent)
            self._changed.clear()
        return self._on_device


class PagedKVCachePool(KVPool):
    """Holds KV memory in `num_blocks` blocks, and a block table for each sequence that has memory.

    A slot is the number of a sequence's block table. No number is used twice.
    """

    def __init__(self, config: Config, shape: KVShape, device: torch.device) -> None:
        super().__init__(shape, device)
        self._block_size = config.block_size
        self.allocator: BlockAllocator[int] = BlockAllocator(config.resolve_num_blocks())
        self.k, self.v = shape.allocate(self.allocator.num_blocks, self._block_size, device)
        assert config.max_seq_len is not None
        self._tables: dict[int, list[int]] = {}
        self._seats: dict[int, int] = {}
        self._rows = BlockTables(config.max_batch_size, self.blocks_for(config.max_seq_len), device)
        self._names = itertools.count()
        if self.max_request_tokens() < config.max_seq_len:
            logger.warning(
                "%d blocks of %d hold %d tokens: less than one sequence of %d; longer requests are refused",
                self.allocator.num_blocks,
                self._block_size,
                self.max_request_tokens(),
                config.max_seq_len,
            )

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_blocks(self) -> int:
        return self.allocator.num_blocks

    @property
    def block_tables(self) -> Tensor:
        return self._rows.tensor

    def device_tables(self) -> Tensor:
        return self._rows.on_device()

    def seat(self, slot: int) -> int:
        return self._seats[slot]

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens need."""
        return -(-tokens // self._block_size)

    # ------------------------------------------------------------------ slots

    def allocate_slot(self) -> int:
        """Allocate an empty block table. Returns its slot. IndexError: `max_batch_size` tables are in use."""
        slot = next(self._names)
        self._seats[slot] = self._rows.take_seat()
        self._tables[slot] = []
        self._lengths[slot] = 0
        return slot

    def grow(self, slot: int, tokens: int) -> None:
        """Extend a block table until its blocks hold `tokens` tokens in all.

        Raises:
            KeyError: the slot is not in use.
            OutOfBlocksError: too few blocks are free; nothing has changed.
        """
        table = self._tables[slot]
        blocks = self.allocator.allocate(max(0, self.blocks_for(tokens) - len(table)), owner=slot)
        self._rows.write(self._seats[slot], len(table), blocks)
        table += blocks

    def free_slot(self, slot: int) -> None:
        """Free a slot and its blocks. KeyError: the slot is not in use."""
        table = self._tables.pop(slot)
        self._rows.free_seat(self._seats.pop(slot))
        del self._lengths[slot]
        self.allocator.free(table)

    def free_slot_count(self) -> int:
        """Return the largest number of sequences that could still be admitted: each needs a table and at least one
        block."""
        return min(self._rows.num_free, self.allocator.num_free)

    # ------------------------------------------------------------------ KVPool

    def reserve(self, request: Request, tokens: int) -> bool:
        if request.slot is None:
            if self.cost(request, tokens) > self.free_token_capacity() or not self._rows.num_free:
                return False
            request.slot = self.allocate_slot()
            self.match_prefix(request)
        missing = self.blocks_for(tokens) - len(self._tables[request.slot])
        if missing <= 0:  # most steps: the last block has room
            return True
        if not self.allocator.can_allocate(missing):
            return False
        self.grow(request.slot, tokens)
        return True

    def _free(self, slot: int) -> None:
        self.free_slot(slot)

    def clear(self) -> None:
        super().clear()
        self.allocator.clear()
        self._tables.clear()
        self._seats.clear()
        self._rows.clear()

    def capacity(self, slot: int) -> int:
        return len(self._tables[slot]) * self._block_size

    def block_table(self, slot: int) -> Sequence[int]:
        return self._tables[slot]

    def max_request_tokens(self) -> int:
        return self.allocator.num_blocks * self._block_size

    def free_token_capacity(self) -> int:
        return self.allocator.num_free * self._block_size

    @property
    def reserved_tokens(self) -> int:
        return self.allocator.num_allocated * self._block_size

    # ------------------------------------------------------------------ audits

    def audit_blocks(self) -> set[int]:
        """Return the ids of leaked blocks: blocks that are allocated, but in no block table."""
        return self.allocator.find_unreferenced_blocks(itertools.chain.from_iterable(self._tables.values()))

    def reclaim_leaked_blocks(self) -> int:
        """Free the blocks that `audit_blocks` finds. Returns their number."""
        return self.allocator.force_free(self.audit_blocks())

    def audit(self, holders: Iterable[Request]) -> int:
        return super().audit(holders) + self.reclaim_leaked_blocks()


def open_pool(config: Config, shape: KVShape, device: torch.device) -> KVPool:
    """Return a new pool of the kind that `kv_cache_backend` names."""
    pools = {"paged": PagedKVCachePool, "contiguous": SlottedKVCache}
    return pools[config.kv_cache_backend](config, shape, device)
