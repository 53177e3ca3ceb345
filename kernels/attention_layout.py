"""The addresses of a forward pass's keys: the position rule as indices, built once and used by every layer.

**The position rule.** Every sequence has columns 0, 1, 2, … of its own. The token at position `p` is stored at
column `p`. A query at position `p` sees the columns `c <= p`, and on a sliding-window layer only those with
`p - c < window`. There is no other mask: causality, chunks, windows and padding all follow from this rule.

```text
                     columns   0 1 2 3 4 5 6 7
  sequence A, decoding at 5    x x x x x Q . .       one query
  sequence B, prompt of 3      Q                     queries at 0, 1, 2: each sees itself and earlier columns
                               x Q
                               x x Q
```

A sequence's columns are in blocks of the store, found through its row of the block table: column `c` is in block
`table[c // block_size]` at offset `c % block_size`. A contiguous cache has blocks as long as the longest sequence.
A column's *address* is its index into the store seen as one flat list of columns (or of columns and heads, if heads
are read one by one). A *tile* is the part that is computed at a time, some queries by some columns. Tiles are
independent of blocks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kernels.decode_rows import DecodeRows
from kernels.transfer import move_together, to_device

# Queries of one sequence whose scores are computed at a time. The scores fit a CPU cache, and most scores above a
# prompt's diagonal are never computed.
QUERY_TILE = 64

# Products have whole tiles of queries and columns; padding is hidden or dropped. A CPU's bfloat16 product is
# compiled for every new size, which takes longer than the product, so there must be few sizes.
COLUMN_TILE = 64


class Workspace:
    """A buffer for gathered keys and values, reused by all layers and passes.

    With a new buffer for each layer, the operating system would map and clear tens of megabytes every time.
    """

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def gather(self, addresses: Tensor, *stores: Tensor) -> Tensor:
        """Copy the rows at these addresses from every store: [len(stores), A, width], valid until the next call.

        Args:
            addresses: [A] int64, row numbers.
            stores: [any, width] each, of the same width, type and device.
        """
        first = stores[0]
        size = len(stores) * len(addresses) * first.shape[1]
        held = self._held
        if held is None or held.numel() < size or held.dtype != first.dtype or held.device != first.device:
            held = first.new_empty(size + size // 4)  # some spare: sequences grow by a column a step
            self._held = held
        gathered = held[:size].view(len(stores), len(addresses), first.shape[1])
        for store, out in zip(stores, gathered, strict=True):
            torch.index_select(store, 0, addresses, out=out)
        return gathered


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """B sequences of one query each and of similar length, computed together.

    Attributes:
        queries: [B] int64, indices into the queries of the pass.
        addresses: [Hkv * B * width] int64, into a store seen as [any, D], head after head.
        width: columns that are read of each sequence, a multiple of COLUMN_TILE.
        hidden: [B, 1, width] bool, True where a column is hidden.
    """

    queries: Tensor
    addresses: Tensor
    width: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class QueryTile:
    """At most QUERY_TILE neighbouring queries of one sequence.

    Attributes:
        queries: the tile's range of the queries of the pass.
        columns: range of the sequence's gathered columns: whole tiles of columns that hold every column that a
            query of this tile sees.
        hidden: [QUERY_TILE, n] bool, True where one of the last n columns is hidden. Earlier columns are all seen.
    """

    queries: slice
    columns: slice
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """One sequence that is in no `DecodeGroup`, computed tile by tile. It usually has several queries.

    Attributes:
        addresses: [Hkv * columns] int64, into a store seen as [any, D], head after head.
        tiles: the sequence's queries, in order.
    """

    addresses: Tensor
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True)
class PagedIndices:
    """The queries of a pass, as the paged kernel takes them.

    Attributes:
        block_table: [any, N] int32 or int64, each row a sequence's blocks.
        positions: [T] int32 or int64, each query's column in its own sequence.
        tiles: [I, 3] int32. Each tile is some queries of one sequence, in order: the sequence's row in
            `block_table`, the index of the first query, and the number of queries.
        split_rows: number of leading queries whose columns may be divided among several programs. Each tile
            of these queries has all queries of its sequence.
        max_length: an upper bound on the columns of each sequence that these leading queries belong to.
        tile_queries: the most queries of a tile; 1: tile i is query i.
    """

    block_table: Tensor
    positions: Tensor
    tiles: Tensor
    split_rows: int
    max_length: int
    tile_queries: int


@dataclass(frozen=True, slots=True)
class HostIndices:
    """Index tensors of all sequences, on the host, for the C++ kernel, which reads the block tables itself.

    Attributes:
        query_offsets: [B + 1] int64, index of each sequence's first query, then the number of queries T.
        kv_lengths: [B] int64, columns of each sequence.
    """

    query_offsets: Tensor
    kv_lengths: Tensor


@dataclass
class AttentionLayout:
    """The addresses that one forward pass reads and writes. Built once a pass and used by every layer.

    Sequences with one query should come first: leading ones are computed together, all others one by one. In
    a layout from `of_decode`, `block_tables` is on the device, `rows` only counts the sequences, and
    `kv_lengths` are upper bounds.

    Attributes:
        block_tables: [any, N] int64, on the host; entries past a sequence's last block are any valid block.
        rows: [B] int64, on the host, each sequence's row in `block_tables`.
        block_size: columns in a block.
        query_lengths: B numbers >= 1, queries of each sequence in this pass.
        kv_lengths: B numbers, columns of each sequence after this pass has written its own.
        heads_kv: heads of keys and values in the stores.
        device: device of the stores, and of the index tensors that are not said to be on the host.
        workspace: a buffer that passes share; a new one if none is given.
        device_tables: `block_tables` on the device, int32 or int64; if not given, they are copied.
    """

    block_tables: Tensor
    rows: Tensor
    block_size: int
    query_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    heads_kv: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    workspace: Workspace = field(default_factory=Workspace)
    device_tables: Tensor | None = None
    # Caches by window. A pass has one or two distinct windows.
    _decode_groups: dict[int | None, list[DecodeGroup]] = field(default_factory=dict, init=False)
    _prefill_segments: dict[int | None, list[PrefillSegment]] = field(default_factory=dict, init=False)
    _paged: PagedIndices | None = field(default=None, init=False)

    @classmethod
    def of_decode(cls, rows: DecodeRows, tables: Tensor, block_size: int, heads_kv: int) -> AttentionLayout:
        """Return the layout of one query for each sequence, from tensors on the device.

        A captured pass reads the tensors' values at each replay. The host does not know the lengths, and assumes
        the longest possible.

        Args:
            rows: the sequences' positions and addresses. Their tiles name rows of `tables`.
            tables: [any, N] int32 or int64, each row a sequence's blocks, then any valid blocks.
            block_size: columns in a block.
            heads_kv: heads of keys and values in the stores.
        """
        count, longest = len(rows.positions), tables.shape[1] * block_size
        layout = cls(
            block_tables=tables,
            rows=torch.arange(count),
            block_size=block_size,
            query_lengths=(1,) * count,
            kv_lengths=(longest,) * count,
            heads_kv=heads_kv,
            device=tables.device,
            device_tables=tables,
        )
        layout.positions, layout.write_addresses = rows.positions, rows.addresses
        layout._paged = PagedIndices(tables, layout.positions, rows.tiles, count, longest, 1)
        return layout

    @cached_property
    def host(self) -> HostIndices:
        """Indices of every sequence, for the C++ kernel."""
        offsets = torch.tensor([0, *itertools.accumulate(self.query_lengths)])
        return HostIndices(offsets, torch.tensor(self.kv_lengths))

    def send(self, tile_queries: int, *others: Tensor) -> list[Tensor]:
        """Copy the indices of the paged kernel and other tensors of the pass to the device, in one block.

        Args:
            tile_queries: see `paged`.
            others: tensors on the host.

        Returns:
            The tensors of `others` on the device, in the same order.
        """
        tile_queries = self._tile_queries(tile_queries)
        hosts = self.rows, self._host_positions, self.host_write_addresses, self._tiles(tile_queries), *others
        moved = move_together(hosts, self.device)
        self.seats, self.positions, self.write_addresses, tiles, *sent = moved
        self._paged = self._with_tiles(tiles, tile_queries)
        return sent

    @cached_property
    def seats(self) -> Tensor:
        """[B] int64: `rows` on the device."""
        return self._moved(self.rows)

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64: each query's column in its own sequence."""
        return self._moved(self._host_positions)

    @cached_property
    def _host_positions(self) -> Tensor:
        offsets, lengths = self.host.query_offsets, self.host.kv_lengths
        # A sequence's last query is at its last column, the query before at the column before.
        return torch.arange(sum(self.query_lengths)) + self._by_query(lengths - offsets[1:])

    @cached_property
    def block_table(self) -> Tensor:
        """[B, N] int64: the block tables of the pass's sequences, as wide as the longest sequence needs."""
        width = -(-max(self.kv_lengths) // self.block_size)
        return self._moved(self.block_tables[:, :width].index_select(0, self.rows))

    @cached_property
    def write_addresses(self) -> Tensor:
        """[T] int64, into a store seen as [any, Hkv, D]: the address of each query's own key and value."""
        return self._moved(self.host_write_addresses)

    @cached_property
    def host_write_addresses(self) -> Tensor:
        """`write_addresses` on the host."""
        positions = self._host_positions
        blocks = self.block_tables[self._by_query(self.rows), positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def _by_query(self, values: Tensor) -> Tensor:
        """Repeat each sequence's value for each of its queries: [B] -> [T], on the host.

        NumPy repeats them, since torch would wake its worker threads for two values or more.
        """
        return torch.from_numpy(np.repeat(values.numpy(), self.query_lengths))

    def _moved(self, indices: Tensor) -> Tensor:
        """Copy indices from the host to the layout's device without blocking."""
        return to_device(indices, self.device)

    @property
    def num_single(self) -> int:
        """Number of leading sequences that have exactly one query."""
        for i, length in enumerate(self.query_lengths):
            if length != 1:
                return i
        return len(self.query_lengths)

    def decode_groups(self, window: int | None) -> list[DecodeGroup]:
        """Return the groups of the leading sequences that have one query each, for layers with this window."""
        if window not in self._decode_groups:
            self._decode_groups[window] = self._build_decode_groups(window)
        return self._decode_groups[window]

    def prefill_segments(self, window: int | None) -> list[PrefillSegment]:
        """Return a segment for each sequence that is in no decode group, for layers with this window."""
        if window not in self._prefill_segments:
            self._prefill_segments[window] = self._build_prefill_segments(window)
        return self._prefill_segments[window]

    def paged(self, tile_queries: int) -> PagedIndices:
        """Return the indices of all sequences for the paged kernel, in tiles of up to `tile_queries`."""
        if self._paged is None:  # a model's layers all have the same tiles
            tile_queries = self._tile_queries(tile_queries)
            self._paged = self._with_tiles(self._moved(self._tiles(tile_queries)), tile_queries)
        return self._paged

    def _tile_queries(self, most: int) -> int:
        """Return the most queries of a tile: 1 if every sequence has one query, else `most`."""
        return most if max(self.query_lengths, default=0) > 1 else 1

    def _addresses(self, tables: Tensor, columns: Tensor) -> Tensor:
        """Return the addresses of columns, head after head: tables [..., N], columns [..., C] -> [Hkv * ... * C].

        The addresses index a store seen as [blocks * block_size * Hkv, D]. Gathered in this order, a head's
        keys are one contiguous matrix. In the store, the keys of all heads are interleaved, and a CPU's
        products with interleaved keys take several times as long as with a contiguous matrix.
        """
        tokens = tables.gather(-1, columns // self.block_size) * self.block_size + columns % self.block_size
        heads = torch.arange(self.heads_kv, device=self.device)
        return (tokens.flatten() * self.heads_kv + heads.unsqueeze(1)).flatten()

    def _tiles(self, tile_queries: int) -> Tensor:
        """Return the tiles of `PagedIndices`, on the host."""
        lengths = np.array(self.query_lengths)
        counts = -(-lengths // tile_queries)  # tiles of each sequence
        sequence = np.repeat(np.arange(len(lengths)), counts)
        before = (np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]) * tile_queries
        first = (np.cumsum(lengths) - lengths)[sequence] + before
        queries = np.minimum(lengths[sequence] - before, tile_queries)
        return torch.from_numpy(
            np.stack([self.rows.numpy()[sequence], first, queries], axis=1).astype(np.int32)
        )

    def _with_tiles(self, tiles: Tensor, tile_queries: int) -> PagedIndices:
        leading = len(list(itertools.takewhile(lambda queries: queries <= tile_queries, self.query_lengths)))
        tables = self._moved(self.block_tables) if self.device_tables is None else self.device_tables
        return PagedIndices(
            block_table=tables,
            positions=self.positions,
            tiles=tiles,
            split_rows=sum(self.query_lengths[:leading]),
            max_length=max(self.kv_lengths[:leading], default=0),
            tile_queries=tile_queries,
        )

    def _build_decode_groups(self, window: int | None) -> list[DecodeGroup]:
        """Group sequences of similar length, so that short sequences are not padded to a long one."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(self.kv_lengths[: self.num_single]):
            tiles = _whole_tiles(length if window is None else min(length, window)) // COLUMN_TILE
            groups[tiles.bit_length()].append(row)  # padded lengths of a group differ by less than 2×
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
        # A hidden column has weight 0, but 0 × NaN is NaN. So past its end a sequence reads its own last column.
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
        """Return the tile of the queries at positions `start` to `end`.

        Args:
            start, end: positions in the sequence.
            window: number of latest columns that a query sees; None: all.
            row_of_0: the index among the queries of the pass that position 0 of the sequence would have.
            first_column: the first column of the sequence that is gathered.
        """
        first = _first_read(start, window)
        last = first + _whole_tiles(end - first)
        # All queries see the columns before `start`, unless a window hides some.
        left_behind = window is not None and end - first > window
        columns = torch.arange(first if left_behind else start, last, device=self.device)
        # Padding rows must see a column, or their softmax would divide by zero.
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
    """Return the first column of the tile that holds the first column seen by a query at `position`."""
    first_seen = 0 if window is None else max(0, position - window + 1)
    return first_seen // COLUMN_TILE * COLUMN_TILE


def _whole_tiles(columns: int) -> int:
    return -(-columns // COLUMN_TILE) * COLUMN_TILE
