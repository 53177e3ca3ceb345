"""KV memory: who holds what (plain integers), and where a pass writes and reads (a view).

A pool stores keys and values per layer as `[blocks, block_size, kv_heads, head_dim]`. A sequence owns a *slot*
(an integer handle) with a block table, a capacity and a length. Bookkeeping computes with integers only, so
schedulers are tested without a model; a `KVView` turns it into the index tensors of one forward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.models.config import ModelConfig
from common.request import Request
from kernels.attention import attention
from kernels.attention_layout import AttentionLayout, Workspace


class KVCapacityError(ValueError):
    """A pass would write outside the columns that its sequence owns."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's keys and values take."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> KVShape:
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, dtype)

    def allocate(
        self, blocks: int, block_size: int, device: torch.device
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Stores of keys and of values, zeroed: for each layer [blocks, block_size, kv_heads, head_dim]."""
        size = (blocks, block_size, self.num_kv_heads, self.head_dim)
        keys, values = (
            [torch.zeros(size, dtype=self.dtype, device=device) for _ in range(self.num_layers)]
            for _ in range(2)
        )
        return keys, values

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def kv_bytes(config: ModelConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of KV memory for `tokens` tokens: 2 (keys and values) x layers x kv_heads x head_dim x itemsize."""
    return KVShape.of(config, dtype).bytes_per_token * tokens


class Span(NamedTuple):
    """The columns `start` to `end` (exclusive) of one sequence, which a pass computes.

    `length` is what the sequence really holds once the pass has succeeded: less than `end` where the pass
    also computes padding.
    """

    slot: int
    start: int
    end: int
    length: int

    @classmethod
    def exact(cls, slot: int, start: int, end: int) -> Span:
        return cls(slot, start, end, end)


class KVPool(ABC):
    """Bookkeeping and storage of KV memory. Every phase has its own kind; nobody asks which.

    Bookkeeping methods use integers only. Storage is written by the pass that uses a view, and by nobody else (a
    pool that shares looks at what it is about to share, between two steps). What a sequence leaves behind stays
    until the next owner of its columns writes over it. A mask would not do against a NaN among it (0 × NaN is
    NaN), so attention reads no column past a sequence's end, masked or not.
    """

    #: [blocks, block_size, kv_heads, head_dim] for each layer
    k: Sequence[Tensor]
    v: Sequence[Tensor]

    def __init__(self, shape: KVShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.workspace = Workspace()
        self._lengths: dict[int, int] = {}  # slot -> columns that hold a token

    # ------------------------------------------------------------------ bookkeeping

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Columns in a block."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks of the store, free ones included."""

    @property
    @abstractmethod
    def block_tables(self) -> Tensor:
        """[seats, N] int64, on the host: the physical blocks of every seat's sequence, in column order.

        Written as blocks are taken, so that no pass has to put a table together. Past a sequence's own blocks its
        row holds ids of any blocks there are.
        """

    def seat(self, slot: int) -> int:
        """The row of the block tables that is this slot's while it is in use."""
        return slot

    @abstractmethod
    def reserve(self, request: Request, tokens: int) -> bool:
        """Make sure `request` owns columns for `tokens` tokens in all; give it a slot if it has none.

        All or nothing: on False nothing has changed.
        """

    def cost(self, request: Request, tokens: int) -> int:  # noqa: ARG002 - all cost the same where nothing is shared
        """Columns that `reserve` takes from the free ones for `tokens` tokens of a request without memory."""
        return -(-tokens // self.block_size) * self.block_size

    def match_prefix(self, request: Request) -> None:  # noqa: B027 - a pool that shares nothing has nothing to do
        """Let a request that has computed nothing yet begin after what is in memory already."""

    def register_prefix(self, request: Request, columns: int) -> None:  # noqa: B027 - the same
        """A request's first `columns` columns are computed, and may be shared from now on."""

    def reset_prefix_cache(self) -> int:
        """Forget what is kept for requests to come and used by nobody now; how many blocks that were."""
        return 0

    def kept_blocks(self) -> Sequence[int]:
        """Blocks kept for requests to come and used by nobody now, those that go first in front."""
        return ()

    @property
    def evictions(self) -> int:
        """Blocks kept for requests to come, and then needed otherwise, since the start."""
        return 0

    def release(self, request: Request) -> None:
        """Take back all that `request` holds; a request that holds nothing is left alone."""
        if request.slot is not None:
            self._free(request.slot)
            request.slot = None

    @abstractmethod
    def capacity(self, slot: int) -> int:
        """Columns that `slot` owns. KeyError: the slot is not in use."""

    @abstractmethod
    def block_table(self, slot: int) -> Sequence[int]:
        """Physical blocks of `slot` in column order. KeyError: the slot is not in use."""

    @abstractmethod
    def max_request_tokens(self) -> int | None:
        """Prompt and new tokens a single request can ever hold here; None: no limit of the pool's own."""

    @property
    @abstractmethod
    def reserved_tokens(self) -> int:
        """Columns set aside for the sequences that hold memory now."""

    def active_seq_count(self) -> int:
        """Sequences that hold memory now."""
        return len(self._lengths)

    @property
    def used_tokens(self) -> int:
        """Columns that hold a token now."""
        return sum(self._lengths.values())

    def free_token_capacity(self) -> int | None:
        """Columns that nobody holds; None where memory comes in slots, and only their number limits."""
        return None

    def get_seq_len(self, slot: int) -> int:
        """Columns of `slot` that hold a token. KeyError: the slot is not in use."""
        return self._lengths[slot]

    def audit(self, holders: Iterable[Request]) -> int:
        """Reclaim memory held for anybody but `holders`; how many slots or blocks that were (0 in health)."""
        leaked = set(self._lengths) - {request.slot for request in holders if request.slot is not None}
        for slot in leaked:
            self._free(slot)
        return len(leaked)

    def clear(self) -> None:
        """Free all memory, whoever holds it, whatever state an interrupted call has left the books in."""
        self._lengths.clear()

    @abstractmethod
    def _free(self, slot: int) -> None:
        """Return a slot and its blocks."""

    # ------------------------------------------------------------------ storage

    def view(self, spans: Sequence[Span]) -> KVView:
        """The addresses of one pass over `spans`, in that order.

        Raises:
            KVCapacityError: a span lies outside its slot's capacity, leaves a gap after the columns already
                held, or a slot appears twice. In a flat store an overflow would write into a neighbour.
        """
        return KVView.of_spans(self, spans)

    def decode_view(self, tables: Tensor, lengths: Tensor) -> KVView:
        """The addresses of a pass over one token of each sequence, as tensors that may hold others next time.

        Nothing is checked: `view` has checked the same pass.

        Args:
            tables: [B, N] int64, on the pool's device: rows of the block tables.
            lengths: [B] int64, likewise: each sequence's columns once this pass has written its own.
        """
        heads_kv = self.shape.num_kv_heads
        return KVView(self, AttentionLayout.of_decode(tables, lengths, self.block_size, heads_kv))

    def advance(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._lengths[span.slot] = span.length


class KVView:
    """One pass's window on a pool: index tensors computed once, read by every layer.

    Attributes:
        layout: where every query finds its keys, and every new key its place.
    """

    def __init__(self, pool: KVPool, layout: AttentionLayout, spans: Sequence[Span] = ()) -> None:
        self.layout = layout
        self._pool = pool
        self._spans = tuple(spans)

    @classmethod
    def of_spans(cls, pool: KVPool, spans: Sequence[Span]) -> KVView:
        """See `KVPool.view`."""
        _check(pool, spans)
        layout = AttentionLayout(
            block_tables=pool.block_tables,
            rows=torch.tensor([pool.seat(span.slot) for span in spans]),
            block_size=pool.block_size,
            query_lengths=tuple(span.end - span.start for span in spans),
            kv_lengths=tuple(span.end for span in spans),
            heads_kv=pool.shape.num_kv_heads,
            device=pool.device,
            workspace=pool.workspace,
        )
        return cls(pool, layout, spans)

    @property
    def positions(self) -> Tensor:
        """[T] int64, each token's column in its own sequence."""
        return self.layout.positions

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Store this pass's keys and values, then let every query see what the position rule shows it.

        Args:
            layer: index of the layer.
            q: [T, Hq, D] queries, rotated.
            k, v: [T, Hkv, D] this pass's keys (rotated) and values.
            scale: factor on the scores.
            window: columns a query sees at most, its own included; None: all.

        Returns:
            [T, Hq, D].
        """
        k_store, v_store = self._pool.k[layer], self._pool.v[layer]
        return attention(q, k, v, k_store, v_store, self.layout, scale=scale, window=window)

    def advance(self) -> None:
        """Set the sequences' new lengths. Called once the whole pass has succeeded: until then what it writes lies
        beyond every length, so a failed pass leaves the pool as it was. (Phase 4's rows that are done, and go
        along idle, write over their own last column; what they compute is dropped.)"""
        self._pool.advance(self._spans)


def _check(pool: KVPool, spans: Sequence[Span]) -> None:
    seen: set[int] = set()
    for span in spans:
        capacity, held = pool.capacity(span.slot), pool.get_seq_len(span.slot)
        if not 0 <= span.start < span.end <= capacity:
            raise KVCapacityError(
                f"slot {span.slot}: columns {span.start} to {span.end} are not within its {capacity}"
            )
        if span.start > held:
            raise KVCapacityError(
                f"slot {span.slot}: writing from column {span.start} leaves a gap after the {held} held"
            )
        if span.slot in seen:
            raise KVCapacityError(f"slot {span.slot} appears twice in one pass")
        seen.add(span.slot)
