"""KV memory of one batch at a time: a row for each request.

All rows are as long as the longest prompt and the longest allowed answer together, at most `max_seq_len`:

```text
prompts of 3, 7 and 5 tokens, up to 4 new ones       row length = 7 + 4 = 11

  row 0   p p p g g g g · · · ·       p prompt   g generated   · reserved, never used
  row 1   p p p p p p p g g g g
  row 2   p p p p p g g g g · ·
```

Each sequence counts its own columns. So a short prompt's first new token is stored right after the prompt's
last token, over the padding.

The length of the rows is known once the batch is complete. So this pool, unlike those of later phases, allocates
its store while a plan is executed: in the `view` of the batch's first pass. It frees the store when the
batch's last request is released.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.kv import KVPool, KVShape, KVView, Span
from common.request import Request
from phase4_static.config import Config


class StaticKVCache(KVPool):
    """Holds rows of equal length: allocated when a batch first runs, freed with the batch's last request.

    A row is a block of the store: block `i` belongs to slot `i`.
    """

    def __init__(self, config: Config, shape: KVShape, device: torch.device) -> None:
        super().__init__(shape, device)
        assert config.max_seq_len is not None
        self.max_seq_len = config.max_seq_len
        self.k: Sequence[Tensor] = ()
        self.v: Sequence[Tensor] = ()
        self._rows = 0
        self._longest_prompt = 0
        self._most_new = 0

    @property
    def block_size(self) -> int:
        """The length of a row, in columns; 0 if there is no batch."""
        return min(self._longest_prompt + self._most_new, self.max_seq_len)

    @property
    def num_blocks(self) -> int:
        return self._rows

    @property
    def block_tables(self) -> Tensor:
        return torch.arange(self._rows).unsqueeze(1)

    def reserve(self, request: Request, tokens: int) -> bool:  # noqa: ARG002 - a row has the full length
        if self.k:
            raise RuntimeError("a static batch cannot grow once it has run")
        if request.slot is None:
            request.slot = self._rows
            self._lengths[request.slot] = 0
            self._rows += 1
        self._longest_prompt = max(self._longest_prompt, request.num_prompt_tokens)
        self._most_new = max(self._most_new, request.params.max_new_tokens)
        return True

    def _free(self, slot: int) -> None:
        del self._lengths[slot]
        if not self._lengths:  # the last request of the batch has left
            self.clear()

    def clear(self) -> None:
        super().clear()
        self.k = self.v = ()
        self._rows = self._longest_prompt = self._most_new = 0

    def capacity(self, slot: int) -> int:
        self.get_seq_len(slot)  # KeyError for a slot that is not in use
        return self.block_size

    def block_table(self, slot: int) -> Sequence[int]:
        self.get_seq_len(slot)
        return (slot,)

    def max_request_tokens(self) -> int | None:
        return None

    @property
    def reserved_tokens(self) -> int:
        return self._rows * self.block_size

    def view(self, spans: Sequence[Span]) -> KVView:
        if not self.k:
            self.k, self.v = self.shape.allocate(self._rows, self.block_size, self.device)
        return super().view(spans)
