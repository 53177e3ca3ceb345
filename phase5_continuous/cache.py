"""KV memory as slots: one for each active sequence, allocated at admission, freed on leaving the batch.

```text
slot 0   A A A A A A A · · · · · · · · ·      each slot has max_seq_len columns,
slot 1   · · · · · · · · · · · · · · · ·      whatever its sequence needs
slot 2   B B B x x x x x · · · · · · · ·      x: stale, from an earlier sequence; beyond B's length,
slot 3   C C C C C C C C C C C · · · · ·         so no query of B sees it
```
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.kv import KVPool, KVShape
from common.request import Request
from phase5_continuous.config import Config


class SlottedKVCache(KVPool):
    """One pool for the engine's life: `max_batch_size` slots of `max_seq_len` columns. A slot is a block."""

    def __init__(self, config: Config, shape: KVShape, device: torch.device) -> None:
        super().__init__(shape, device)
        assert config.max_seq_len is not None
        self.num_slots = config.max_batch_size
        self.max_seq_len = config.max_seq_len
        self.k, self.v = shape.allocate(self.num_slots, self.max_seq_len, device)
        self._block_tables = torch.arange(self.num_slots).unsqueeze(1)
        self._device_tables = self._block_tables.to(device)
        self.clear()

    # ------------------------------------------------------------------ slots

    def allocate_slot(self) -> int:
        """Allocate a free slot. Returns its number. RuntimeError: all slots are in use."""
        if not self._free_slots:
            raise RuntimeError(f"all {self.num_slots} KV slots are in use")
        slot = self._free_slots.pop()
        self._lengths[slot] = 0
        return slot

    def free_slot(self, slot: int) -> None:
        """Free a slot. KeyError: it is not in use."""
        del self._lengths[slot]
        self._free_slots.append(slot)

    def free_slot_count(self) -> int:
        """Return the number of free slots, so of sequences that can still be admitted."""
        return len(self._free_slots)

    # ------------------------------------------------------------------ KVPool

    @property
    def block_size(self) -> int:
        return self.max_seq_len

    @property
    def num_blocks(self) -> int:
        return self.num_slots

    @property
    def block_tables(self) -> Tensor:
        return self._block_tables

    def device_tables(self) -> Tensor:
        return self._device_tables

    def reserve(self, request: Request, tokens: int) -> bool:
        if tokens > self.max_seq_len:
            return False
        if request.slot is None:
            if not self._free_slots:
                return False
            request.slot = self.allocate_slot()
        return True

    def _free(self, slot: int) -> None:
        self.free_slot(slot)

    def clear(self) -> None:
        super().clear()
        self._free_slots = list(reversed(range(self.num_slots)))

    def capacity(self, slot: int) -> int:
        self.get_seq_len(slot)  # KeyError for a slot that is not in use
        return self.max_seq_len

    def block_table(self, slot: int) -> Sequence[int]:
        self.get_seq_len(slot)
        return (slot,)

    def max_request_tokens(self) -> int | None:
        return self.max_seq_len

    @property
    def reserved_tokens(self) -> int:
        return len(self._lengths) * self.max_seq_len
