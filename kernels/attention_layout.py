"""Where one forward pass finds its keys: the position rule as indices, built once and read by every layer.

**The position rule.** Every sequence has columns 0, 1, 2, … of its own; the token at position `p` is stored at
column `p`; a query at position `p` sees the columns `c <= p`, and on a sliding-window layer only those with
`p - c < window`. There is no other mask: causality, chunks, windows and padding are all this rule.

```text
                     columns   0 1 2 3 4 5 6 7
  sequence A, decoding at 5    x x x x x Q . .       one query
  sequence B, prompt of 3      Q                     queries at 0, 1, 2: each sees itself and what is before
                               x Q
                               x x Q
```

A sequence's columns live in blocks of the store, found through its row of the block table: column `c` is in
block `table[c // block_size]` at offset `c % block_size`. A contiguous cache is the same thing with blocks as
long as the longest sequence. A column's *address* is where it lies once blocks (and heads, where every head is
read for itself) are laid end to end: an index into the store seen as one flat list. What is computed at a time,
some queries by some columns, is a *tile*: it has nothing to do with blocks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kernels.transfer import to_device

# Queries of one sequence whose scores are computed at a time: few enough for a processor's cache, and most of what
# lies above a prompt's diagonal is never computed.
QUERY_TILE = 64

# Products are of whole tiles of queries and of columns; what nobody needs is hidden or dropped. A CPU's bfloat16
# product is compiled for every size it meets, which takes longer than the product: sizes must come again.
COLUMN_TILE = 64


class Workspace:
    """Memory that keys and values are gathered into, kept from layer to layer and from pass to pass.

    With an allocation each, the operating system would hand out and clear the same tens of megabytes over and over.
    """

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def gather(self, addresses: Tensor, *stores: Tensor) -> Tensor:
        """What every store holds at these addresses, [len(stores), A, width]; good until the next call.

        Args:
            addresses: [A] int64.
            stores: [any, width] each, alike in width, type and device.
        """
        first = stores[0]
        size = len(stores) * len(addresses) * first.shape[1]
        held = self._held
        if held is None or held.numel() < size or held.dtype != first.dtype or held.device != first.device:
            held = first.new_empty(size + size // 4)  # more than asked: sequences grow by a column a step
            self._held = held
        gathered = held[:size].view(len(stores), len(addresses), first.shape[1])
        for store, out in zip(stores, gathered, strict=True):
            torch.index_select(store, 0, addresses, out=out)
        return gathered


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of one query each, B of them, that are about as long: computed together.

    Attributes:
        queries: [B] int64, rows of the pass.
        addresses: [Hkv * B * width] int64, into a store seen as [any, D], head after head.
        width: columns that are read of each sequence: whole tiles.
        hidden: [B, 1, width] bool, True: not to be seen.
    """

    queries: Tensor
    addresses: Tensor
    width: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Some neighbouring queries of one sequence: at most QUERY_TILE.

    Attributes:
        queries: rows of the pass.
        columns: of the sequence's gathered ones: whole tiles, with all that any of the queries sees.
        hidden: [QUERY_TILE, the last so many columns] bool, True: not to be seen. All before those are seen.
    """

    queries: slice
    columns: slice
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """One sequence with several queries, computed tile by tile.

    Attributes:
        addresses: [Hkv * columns] int64, into a store seen as [any, D], head after head.
        tiles: its queries, in order.
    """

    addresses: Tensor
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True)
class VarlenIndices:
    """All sequences' columns one after the other, the form in which varlen kernels take keys.

    Of each sequence come the columns that any of its queries sees, A in all: a window leaves the first ones out.
    Its last column always comes, and varlen kernels count distances from there: a sequence's last query belongs to
    its last key, the query before to the key before. So what is left out in front moves nothing.

    Attributes:
        addresses: [A] int64, into a store seen as [any, Hkv, D].
        query_offsets: [B + 1] int32, where each sequence's queries begin, and their end.
        kv_offsets: [B + 1] int32, where each sequence's addresses begin, and their end.
        max_queries: most queries of a sequence, on the host.
        max_columns: most addresses of a sequence, on the host.
    """

    addresses: Tensor
    query_offsets: Tensor
    kv_offsets: Tensor
    max_queries: int
    max_columns: int


@dataclass(frozen=True, slots=True)
class PagedIndices:
    """The leading sequences that have one query each, in the form in which the paged kernel takes them.

    Attributes:
        block_table: [B, N] int64.
        lengths: [B] int32 or int64, columns of each sequence.
        max_length: the largest of them, on the host, or more.
        total_length: their sum, on the host, or more.
    """

    block_table: Tensor
    lengths: Tensor
    max_length: int
    total_length: int


@dataclass(frozen=True, slots=True)
class HostIndices:
    """All sequences, on the host. With it the C++ kernel walks the block tables by itself.

    Attributes:
        query_offsets: [B + 1] int64, where each sequence's queries begin, and their end.
        kv_lengths: [B] int64, columns of each sequence.
    """

    query_offsets: Tensor
    kv_lengths: Tensor


@dataclass
class AttentionLayout:
    """Where the keys of one forward pass lie, and where its own go. Built once a pass; every layer reads it.

    Sequences with one query should come first: they are computed together, the others one by one.

    Attributes:
        block_tables: [any, N] int64, on the host; entries past a sequence's last block are any valid block.
        rows: [B] int64, on the host: which of the tables is each sequence's.
        block_size: columns in a block.
        query_lengths: queries of each sequence in this pass, B of them, each >= 1.
        kv_lengths: columns of each sequence once this pass has written its own, B of them.
        heads_kv: heads of keys and values in the stores.
        device: where the stores are, and all index tensors but those said to be on the host.
        workspace: one that passes share; each has its own if none is given.
    """

    block_tables: Tensor
    rows: Tensor
    block_size: int
    query_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    heads_kv: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    workspace: Workspace = field(default_factory=Workspace)
    # A pass has few distinct windows (none, or none and one), so these hold an entry or two.
    _decode_groups: dict[int | None, list[DecodeGroup]] = field(default_factory=dict, init=False)
    _prefill_segments: dict[int | None, list[PrefillSegment]] = field(default_factory=dict, init=False)
    _varlen: dict[int | None, VarlenIndices] = field(default_factory=dict, init=False)

    @classmethod
    def of_decode(cls, tables: Tensor, lengths: Tensor, block_size: int, heads_kv: int) -> AttentionLayout:
        """One query of each sequence, from tensors on the device: in them a captured pass finds what holds then.

        The host does not know the lengths; it counts on the longest there can be.

        Args:
            tables: [B, N] int64, each sequence's own blocks; past them, any valid ones.
            lengths: [B] int64, columns of each sequence once this pass has written its own.
        """
        count, width = tables.shape
        longest = width * block_size
        layout = cls(
            block_tables=tables,
            rows=torch.arange(count),
            block_size=block_size,
            query_lengths=(1,) * count,
            kv_lengths=(longest,) * count,
            heads_kv=heads_kv,
            device=tables.device,
        )
        layout.positions = lengths - 1
        layout.block_table = tables
        layout.paged = PagedIndices(tables, lengths, longest, count * longest)
        blocks = tables.gather(1, (layout.positions // block_size).unsqueeze(1)).squeeze(1)
        layout.write_addresses = blocks * block_size + layout.positions % block_size
        return layout

    @cached_property
    def host(self) -> HostIndices:
        """For every sequence of the layout."""
        offsets = torch.tensor([0, *itertools.accumulate(self.query_lengths)])
        return HostIndices(offsets, torch.tensor(self.kv_lengths))

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64: each query's column in its own sequence."""
        offsets, lengths = self.host.query_offsets, self.host.kv_lengths
        # A sequence's last query is at its last column, the query before at the column before.
        return self._moved(torch.arange(sum(self.query_lengths)) + self._by_query(lengths - offsets[1:]))

    @cached_property
    def block_table(self) -> Tensor:
        """[B, N] int64: the tables of the pass's own sequences, as wide as the longest of them needs."""
        width = -(-max(self.kv_lengths) // self.block_size)
        return self._moved(self.block_tables[:, :width].index_select(0, self.rows))

    @cached_property
    def write_addresses(self) -> Tensor:
        """[T] int64, into a store seen as [any, Hkv, D]: where each query's own key and value go."""
        sequence = self._moved(self._by_query(torch.arange(len(self.rows))))
        blocks = self.block_table[sequence, self.positions // self.block_size]
        return blocks * self.block_size + self.positions % self.block_size

    def _by_query(self, values: Tensor) -> Tensor:
        """[B] -> [T], on the host: each sequence's value for each of its queries.

        Not by torch, which calls its workers for two values and more.
        """
        return torch.from_numpy(np.repeat(values.numpy(), self.query_lengths))

    def _moved(self, indices: Tensor) -> Tensor:
        """Copy indices from the host to the layout's device without blocking."""
        return to_device(indices, self.device)

    @property
    def num_single(self) -> int:
        """How many leading sequences have exactly one query."""
        for i, length in enumerate(self.query_lengths):
            if length != 1:
                return i
        return len(self.query_lengths)

    def decode_groups(self, window: int | None) -> list[DecodeGroup]:
        """For layers with this window: the leading sequences of one query."""
        if window not in self._decode_groups:
            self._decode_groups[window] = self._build_decode_groups(window)
        return self._decode_groups[window]

    def prefill_segments(self, window: int | None) -> list[PrefillSegment]:
        """For layers with this window: every sequence behind the leading ones of one query."""
        if window not in self._prefill_segments:
            self._prefill_segments[window] = self._build_prefill_segments(window)
        return self._prefill_segments[window]

    def varlen(self, window: int | None) -> VarlenIndices:
        """For layers with this window: every sequence of the layout, whatever its number of queries."""
        if window not in self._varlen:
            self._varlen[window] = self._build_varlen(window)
        return self._varlen[window]

    @cached_property
    def paged(self) -> PagedIndices:
        """For the leading sequences of one query; there must be one."""
        count = self.num_single
        lengths = self.kv_lengths[:count]
        on_device = self._moved(torch.tensor(lengths, dtype=torch.int32))
        return PagedIndices(self.block_table[:count], on_device, max(lengths), sum(lengths))

    @cached_property
    def after_singles(self) -> AttentionLayout:
        """The layout of the sequences behind the leading ones of one query."""
        count = self.num_single
        return AttentionLayout(
            self.block_tables,
            self.rows[count:],
            self.block_size,
            self.query_lengths[count:],
            self.kv_lengths[count:],
            self.heads_kv,
            self.device,
            self.workspace,
        )

    def _addresses(self, tables: Tensor, columns: Tensor) -> Tensor:
        """Where these columns lie, head after head: tables [..., N], columns [..., C] -> [Hkv * ... * C].

        Into a store seen as [blocks * block_size * Hkv, D]. A head's keys become one matrix this way, read from its
        first number to its last. As they lie in the store, with the other heads' in between, products with them
        take a CPU several times as long.
        """
        tokens = tables.gather(-1, columns // self.block_size) * self.block_size + columns % self.block_size
        heads = torch.arange(self.heads_kv, device=self.device)
        return (tokens.flatten() * self.heads_kv + heads.unsqueeze(1)).flatten()

    def _build_varlen(self, window: int | None) -> VarlenIndices:
        lengths = list(self.kv_lengths)
        if window is not None:  # a sequence's first query sees furthest back
            lengths = [min(kv, window + n - 1) for n, kv in zip(self.query_lengths, lengths, strict=True)]
        ends, counts = self._moved(torch.tensor([self.kv_lengths, lengths]))
        sequence = torch.repeat_interleave(counts, output_size=sum(lengths))  # [A]: 0, 0, …, 1, 1, …
        # A sequence's last address is its last column, the address before it the column before.
        columns = torch.arange(sum(lengths), device=self.device) + (ends - counts.cumsum(0))[sequence]
        addresses = self.block_table[sequence, columns // self.block_size] * self.block_size
        query_offsets, kv_offsets = (
            self._moved(torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32))
            for each in (self.query_lengths, lengths)
        )
        return VarlenIndices(
            addresses=addresses + columns % self.block_size,
            query_offsets=query_offsets,
            kv_offsets=kv_offsets,
            max_queries=max(self.query_lengths),
            max_columns=max(lengths),
        )

    def _build_decode_groups(self, window: int | None) -> list[DecodeGroup]:
        """Each of sequences about as long: fifteen short ones beside a long one do not read as much as that one."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(self.kv_lengths[: self.num_single]):
            tiles = _whole_tiles(length if window is None else min(length, window)) // COLUMN_TILE
            groups[tiles.bit_length()].append(row)  # less than twice as long as the shortest of its group
        return [self._build_decode_group(rows, window) for rows in groups.values()]

    def _build_decode_group(self, rows: list[int], window: int | None) -> DecodeGroup:
        lengths = [self.kv_lengths[row] for row in rows]
        visible = [length if window is None else min(length, window) for length in lengths]
        width = _whole_tiles(max(visible))
        kv = self._moved(torch.tensor(lengths)).unsqueeze(1)  # [B, 1]
        first = self._moved(torch.tensor([n - m for n, m in zip(lengths, visible, strict=True)]))
        columns = first.unsqueeze(1) + torch.arange(width, device=self.device)  # [B, width]
        hidden = (columns >= kv).unsqueeze(1)  # past a sequence's end
        queries = self._moved(torch.tensor(rows))
        # Hidden columns weigh nothing, but 0 × NaN is NaN: past its end, a sequence reads its own last column.
        addresses = self._addresses(self.block_table[queries], torch.minimum(columns, kv - 1))
        return DecodeGroup(queries, addresses, width, hidden)

    def _build_prefill_segments(self, window: int | None) -> list[PrefillSegment]:
        segments: list[PrefillSegment] = []
        count = self.num_single
        row = count
        for i in range(count, len(self.query_lengths)):
            queries, end = self.query_lengths[i], self.kv_lengths[i]
            start = end - queries
            first = _first_read(start, window)
            columns = torch.arange(first, first + _whole_tiles(end - first), device=self.device)
            columns.clamp_(max=end - 1)  # past its end, a sequence reads its own last column
            tiles = tuple(
                self._query_tile(at, min(at + QUERY_TILE, end), window, row - start, first)
                for at in range(start, end, QUERY_TILE)
            )
            segments.append(PrefillSegment(self._addresses(self.block_table[i], columns), tiles))
            row += queries
        return segments

    def _query_tile(
        self, start: int, end: int, window: int | None, row_of_0: int, first_column: int
    ) -> QueryTile:
        """The queries at positions `start` to `end`, in a pass where position 0 would be row `row_of_0`."""
        first = _first_read(start, window)
        last = first + _whole_tiles(end - first)
        # What came before these queries is seen by all of them, unless a window leaves it behind.
        left_behind = window is not None and end - first > window
        columns = torch.arange(first if left_behind else start, last, device=self.device)
        # What fills the tile behind the last query is to see something, or its softmax would divide by zero.
        positions = torch.arange(start, start + QUERY_TILE, device=self.device).clamp_(max=end - 1)
        distance = positions.unsqueeze(1) - columns  # p - c
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        return QueryTile(
            queries=slice(row_of_0 + start, row_of_0 + end),
            columns=slice(first - first_column, last - first_column),
            hidden=hidden,
        )


def _first_read(position: int, window: int | None) -> int:
    """Where the tile of columns begins in which the first one lies that a query at `position` sees."""
    first_seen = 0 if window is None else max(0, position - window + 1)
    return first_seen // COLUMN_TILE * COLUMN_TILE


def _whole_tiles(columns: int) -> int:
    return -(-columns // COLUMN_TILE) * COLUMN_TILE
