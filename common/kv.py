"""KV memory: which sequence holds which blocks (plain integers), and where a pass writes and reads (a view).

A pool stores keys and values per layer as `[blocks, block_size, kv_heads, head_dim]`. A *column* holds one token's
key and value: the token at position `p` of a sequence is in the sequence's column `p`. A sequence owns a *slot* (an
integer handle) with a block table, a capacity and a length, both in columns. Bookkeeping computes with integers
only, so schedulers are tested without a model. A `KVView` turns the integers into the index tensors of one pass.

Each phase that changes the memory has its pool in its `cache`: `phase4_static.cache` reserves a rectangle, and
`phase6_paged.allocator` hands out blocks, which `phase8_prefix.cache` shares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from common.request import Request
from kernels.attention import attention, written_attention
from kernels.attention_layout import AttentionLayout, Workspace
from kernels.decode_rows import DecodeRows
from kernels.paged_attention import queries_per_tile
from kernels.rope import HeadNorms, norm_rope_write_triton
from kernels.transfer import to_device


class KVCapacityError(ValueError):
    """The spans of a pass do not fit the columns that its sequences own: see `KVPool.view`."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape and type of one token's keys and values. `group`: number of query heads that share a KV head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    group: int = 1

    def allocate(
        self, blocks: int, block_size: int, device: torch.device
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return zeroed stores of keys and of values: for each layer [blocks, block_size, kv_heads, head_dim]."""
        size = (blocks, block_size, self.num_kv_heads, self.head_dim)
        keys, values = (
            [torch.zeros(size, dtype=self.dtype, device=device) for _ in range(self.num_layers)]
            for _ in range(2)
        )
        return keys, values

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class Span(NamedTuple):
    """The columns `start` to `end` (exclusive) of one sequence, which a pass computes.

    `length` is the number of columns that hold a token of the sequence once the pass has succeeded. It is less than
    `end` if the pass also computes padding or guesses.
    """

    slot: int
    start: int
    end: int
    length: int

    @classmethod
    def exact(cls, slot: int, start: int, end: int) -> Span:
        return cls(slot, start, end, end)


class SchedulerPool(Protocol):
    """The part of a KV pool that schedulers use: integers only, so schedulers are tested without a model."""

    def reserve(self, request: Request, tokens: int) -> bool:
        """See `KVPool.reserve`."""

    def reserve_spare(self, request: Request, tokens: int, kept: int) -> int:
        """Reserve up to `tokens` columns in all if about `kept` columns stay free. Returns how many may be used.

        See `KVPool.reserve_spare`.
        """

    def cost(self, request: Request, tokens: int) -> int:
        """See `KVPool.cost`."""

    def free_token_capacity(self) -> int | None:
        """See `KVPool.free_token_capacity`."""

    def match_prefix(self, request: Request) -> None:
        """See `KVPool.match_prefix`."""


class KVPool(ABC):
    """KV memory: which sequence holds which blocks, and the stores that a pass writes. Phases use different kinds.

    The stores are written by the pass that uses a view, and by nothing else. (A pool that shares blocks reads
    them between two steps.) Keys and values of a sequence that has left stay until the next owner of its columns
    writes over them. If one of these old values is NaN, hiding its column by a weight of 0 would not help the next
    owner, since 0 × NaN is NaN. So attention never reads a column past the last one that the pass computes for a
    sequence.

    Attributes:
        k, v: the stores, [blocks, block_size, kv_heads, head_dim] for each layer.
    """

    k: Sequence[Tensor]
    v: Sequence[Tensor]

    def __init__(self, shape: KVShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.workspace = Workspace()
        self._lengths: dict[int, int] = {}  # slot -> columns that hold a token

    # ------------------------------------------------------------------ for the scheduler (`SchedulerPool`)

    @abstractmethod
    def reserve(self, request: Request, tokens: int) -> bool:
        """Reserve columns until `request` has at least `tokens` of them, and a slot if it has none.

        Returns False, and changes nothing, if too little memory is free. A pool with a prefix cache evicts unused
        blocks first (`phase8_prefix.cache`).
        """

    def reserve_spare(self, request: Request, tokens: int, kept: int) -> int:
        """Reserve columns as `reserve` does, but only if enough columns stay free for other requests.

        Args:
            request: the request; it has memory.
            tokens: how many columns the request wants in all, more than it has tokens.
            kept: about how many columns must stay free. If fewer would, the request gets only the columns that are
                left in its last block.

        Returns:
            How many columns the request may use now: `tokens`, or fewer.
        """
        held, free = request.num_tokens, self.free_token_capacity()
        if free is not None and free <= tokens - held + kept:
            tokens = min(tokens, -(-held // self.block_size) * self.block_size)
        return tokens if self.reserve(request, tokens) else held

    def cost(self, request: Request, tokens: int) -> int:  # noqa: ARG002 - alike for all if nothing is shared
        """Return how many free columns `reserve` would take for `tokens` tokens of a request that has no memory."""
        return -(-tokens // self.block_size) * self.block_size

    def free_token_capacity(self) -> int | None:
        """Return how many columns are free; None if each slot has its own memory, so that only slots run out."""
        return None

    def match_prefix(self, request: Request) -> None:  # noqa: B027 - a pool that shares nothing has nothing to do
        """Search the prefix cache for the longest prefix of a new request, and let its prefill begin after that
        prefix. Does nothing in a pool without a prefix cache."""

    # ------------------------------------------------------------------ for the runner

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Columns in a block."""

    @property
    @abstractmethod
    def block_tables(self) -> Tensor:
        """[seats, N] int64, on the host: row s has the physical blocks of seat s's sequence, for its columns (token
        positions) from 0 on. N is the most blocks of one sequence.

        Written when a sequence gets blocks, so that no pass has to build a table. Entries after a sequence's last
        block are ids of any existing blocks.
        """

    def device_tables(self) -> Tensor:
        """Return the block tables on the pool's device, as they are now, for passes launched from now on."""
        return to_device(self.block_tables, self.device)

    def seat(self, slot: int) -> int:
        """Return the seat of a slot that is in use: its row of `block_tables`."""
        return slot

    def get_seq_len(self, slot: int) -> int:
        """Return how many columns of `slot` hold a token. Raises KeyError if the slot is not in use."""
        return self._lengths[slot]

    def view(self, spans: Sequence[Span]) -> KVView:
        """Return the addresses of one pass over `spans`, in that order.

        Raises:
            KVCapacityError: a span is empty, lies outside its slot's capacity, or leaves a gap after the columns
                that hold a token, or a slot appears twice. Unchecked, a pass could write over another sequence's
                columns.
        """
        _check(self, spans)
        layout = AttentionLayout(
            block_tables=self.block_tables,
            rows=torch.tensor([self.seat(span.slot) for span in spans]),
            block_size=self.block_size,
            query_lengths=tuple([span.end - span.start for span in spans]),
            kv_lengths=tuple([span.end for span in spans]),
            heads_kv=self.shape.num_kv_heads,
            device=self.device,
            workspace=self.workspace,
            device_tables=self.device_tables(),
        )
        return KVView(self, layout, spans)

    def decode_view(self, rows: DecodeRows) -> KVView:
        """Return the view of a pass over one token of each sequence, from tensors that are on the device.

        A pass that is captured with this view may be replayed after the values of `rows` and of the block tables
        have changed. No spans are checked, since `view` was called for the same pass and has checked them.
        """
        tables, heads_kv = self.device_tables(), self.shape.num_kv_heads
        return KVView(self, AttentionLayout.of_decode(rows, tables, self.block_size, heads_kv))

    def advance(self, spans: Iterable[Span]) -> None:
        """Set each sequence's number of columns that hold a token to the `length` of its span."""
        for span in spans:
            self._lengths[span.slot] = span.length

    def register_prefix(self, request: Request, columns: int) -> None:  # noqa: B027 - as `match_prefix`
        """Let other requests share the full blocks of a request's first `columns` columns, which were computed.

        Does nothing in a pool without a prefix cache.
        """

    def release(self, request: Request) -> None:
        """Free all memory of `request`; a request that holds none is left alone."""
        if request.slot is not None:
            self._free(request.slot)
            request.slot = None

    @abstractmethod
    def _free(self, slot: int) -> None:
        """Free a slot and its blocks."""

    # ------------------------------------------------------------------ for the engine: limits and repair

    @abstractmethod
    def max_request_tokens(self) -> int | None:
        """Return the most tokens that one request can ever hold here; None: the pool sets no limit of its own."""

    def reset_prefix_cache(self) -> int:
        """Free the cached blocks that no sequence uses. Returns their number."""
        return 0

    def audit(self, holders: Iterable[Request]) -> int:
        """Free leaked memory: slots that no request of `holders` holds and, from phase 6 on, blocks in no block
        table. Returns how many slots and blocks have leaked."""
        leaked = set(self._lengths) - {request.slot for request in holders if request.slot is not None}
        for slot in leaked:
            self._free(slot)
        return len(leaked)

    def clear(self) -> None:
        """Free all memory, whatever state an interrupted call has left the bookkeeping in."""
        self._lengths.clear()

    # ------------------------------------------------------------------ for telemetry, checks and tests

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks of the store, free ones included."""

    @abstractmethod
    def capacity(self, slot: int) -> int:
        """Return how many columns `slot` owns. Raises KeyError if the slot is not in use."""

    @abstractmethod
    def block_table(self, slot: int) -> Sequence[int]:
        """Return the physical blocks of `slot`, for its columns (token positions) from 0 on.

        Raises:
            KeyError: the slot is not in use.
        """

    @property
    @abstractmethod
    def reserved_tokens(self) -> int:
        """Number of columns that are set aside for sequences."""

    @property
    def used_tokens(self) -> int:
        """Number of columns that hold a token of a sequence which has memory now."""
        return sum(self._lengths.values())

    @property
    def slots(self) -> Collection[int]:
        """The slots in use: one for each sequence that holds memory."""
        return self._lengths.keys()

    def kept_blocks(self) -> Sequence[int]:
        """Return the blocks that the prefix cache keeps and no sequence uses, in the order of eviction."""
        return ()

    def disk_blocks(self) -> tuple[int, int]:
        """Return the number of blocks in a file below the prefix cache, and of its places; (0, 0) without one."""
        return 0, 0

    def counts(self) -> Mapping[str, float]:
        """Return the pool's own totals since the start, by their names in `telemetry.Counters`."""
        return {}


class KVView:
    """The addresses of one pass in a pool: index tensors, computed once and read by every layer.

    Attributes:
        layout: the addresses of every query's keys and of every new key.
    """

    def __init__(self, pool: KVPool, layout: AttentionLayout, spans: Sequence[Span] = ()) -> None:
        self.layout = layout
        self._pool = pool
        self._spans = tuple(spans)

    @property
    def positions(self) -> Tensor:
        """[T] int64: each token's column in its own sequence."""
        return self.layout.positions

    def send(self, *hosts: Tensor) -> list[Tensor]:
        """Return tensors of the pass on the pool's device. On a CPU, these are the given tensors.

        On a GPU the tensors are copied together with this view's indices, in one transfer. The host does not wait
        for this transfer.
        """
        if self._pool.device.type == "cpu":
            return list(hosts)
        shape = self._pool.shape
        return self.layout.send(queries_per_tile(shape.group, shape.dtype), *hosts)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Write this pass's keys and values, then compute causal attention: a query sees columns up to its own.

        Args:
            layer: index of the layer.
            q: [T, Hq, D] queries, rotated.
            k, v: [T, Hkv, D] this pass's keys (rotated) and values.
            scale: factor on the scores.
            window: the most columns that a query sees, its own included; None: all up to its own.

        Returns:
            [T, Hq, D].
        """
        k_store, v_store = self._pool.k[layer], self._pool.v[layer]
        return attention(q, k, v, k_store, v_store, self.layout, scale=scale, window=window)

    def attend_heads(
        self,
        layer: int,
        heads: Tensor,
        norms: HeadNorms | None,
        cos: Tensor,
        sin: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Like `attend`, for heads that are not normed and rotated yet. One Triton kernel norms and rotates queries
        and keys and writes keys and values. Then attention follows.

        Args:
            layer, scale, window: as for `attend`.
            heads: [T, Hq + 2 Hkv, D], the projected queries, keys and values.
            norms: norms of queries and keys; None: the model has none.
            cos, sin: [T, D/2], the angles of each token's rotation.

        Returns:
            [T, Hq, D].
        """
        k_store, v_store = self._pool.k[layer], self._pool.v[layer]
        addresses = self.layout.write_addresses
        q = norm_rope_write_triton(heads, norms, cos, sin, k_store, v_store, addresses)
        return written_attention(q, k_store, v_store, self.layout, scale=scale, window=window)

    def advance(self) -> None:
        """Set the sequences' new lengths. Called after the pass; from phase 9 on, when the pass is launched.

        A pass writes only columns beyond the old lengths. So if it fails before this call, the sequences are as
        before. (Phase 4's idle rows write over their own last column, and their results are dropped.) If it fails
        after this call, `Runner.rewind` sets the lengths back (phase 9).
        """
        self._pool.advance(self._spans)


def _check(pool: KVPool, spans: Sequence[Span]) -> None:
    seen: set[int] = set()
    for span in spans:
        capacity, held = pool.capacity(span.slot), pool.get_seq_len(span.slot)
        if not 0 <= span.start < span.end <= capacity:
            raise KVCapacityError(
                f"slot {span.slot}: span {span.start} to {span.end} is empty, or not within its {capacity} columns"
            )
        if span.start > held:
            raise KVCapacityError(
                f"slot {span.slot}: writing from column {span.start} leaves a gap after the {held} held"
            )
        if span.slot in seen:
            raise KVCapacityError(f"slot {span.slot} appears twice in one pass")
        seen.add(span.slot)
