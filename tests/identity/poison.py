"""Shows that no pass reads a column that holds no token of its sequence.

Pools do not clear memory, so these columns hold old numbers. Masking them would not be enough: 0 × NaN is NaN.
Here every column without a token is set to NaN before each pass, even past a sequence's end in its own blocks.
Tokens and logits must stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from common.engine.engine import Engine
from common.kv import KVPool, KVView, Span
from phase8_prefix.cache import PrefixCachingPool


class Poison:
    """Sets every column that holds no token to NaN, before each pass of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.pool = engine, engine.runner.pool
        self.stream = getattr(engine.runner, "stream", None)  # phase 9 computes on a stream
        self.past_an_end = 0  # columns of a sequence's own blocks that were poisoned
        self._view = self.pool.view
        self.pool.view = self.view  # type: ignore[method-assign]

    def view(self, spans: Sequence[Span]) -> KVView:
        view = self._view(spans)  # phase 4 allocates here
        if self.stream is None:
            self.poison()
        else:
            self.stream.call(self.poison)  # after the submitted work
        return view

    def poison(self) -> None:
        held, guessed = held_rows(self.pool), guessed_rows(self.engine)
        self.past_an_end += self.pool.reserved_tokens - self.pool.used_tokens
        for layer in (*self.pool.k, *self.pool.v):
            rows = layer.view(-1, *layer.shape[2:])
            kept, unread = rows[held].clone(), rows[guessed].clone()
            assert not kept.isnan().any(), "what a sequence has computed is a number"
            rows.fill_(math.nan)
            rows[guessed] = unread
            rows[held] = kept


def held_rows(pool: KVPool) -> torch.Tensor:
    """Return the rows of the flat store that hold a token, of a sequence or in the prefix cache."""
    size = pool.block_size
    held = {row for slot, length in pool._lengths.items() for row in rows_of(pool, slot, range(length))}
    if isinstance(pool, PrefixCachingPool):
        held |= {node.block * size + row for _, node in pool.tree.walk() for row in range(size)}
    return torch.tensor(sorted(held), dtype=torch.int64)


def guessed_rows(engine: Engine) -> torch.Tensor:
    """Return the rows past sequences' ends with computed guesses (phase 10). An accepted guess becomes a token."""
    pool = engine.runner.pool
    rows: list[int] = []
    for request in engine.live_requests:
        if request.slot is not None and request.drafts.token_ids:
            length = pool.get_seq_len(request.slot)
            rows += rows_of(pool, request.slot, range(length, length + len(request.drafts.token_ids)))
    return torch.tensor(rows, dtype=torch.int64)


def rows_of(pool: KVPool, slot: int, columns: range) -> list[int]:
    size = pool.block_size
    return [pool.block_table(slot)[column // size] * size + column % size for column in columns]
