"""Attention over a KV store of blocks: one rule, one layout, and the choice of how to compute it.

**The position rule.** Every sequence owns a logical row of columns 0, 1, 2, …; the token at position `p` is
stored at column `p`; a query at position `p` sees the columns `c <= p`, and on a sliding-window layer only
those with `p - c < window`. There is no other mask: causality, chunks, windows and padding are all this rule.

```text
                     columns   0 1 2 3 4 5 6 7
  sequence A, decoding at 5    x x x x x Q . .       one query
  sequence B, prompt of 3      Q                     queries at 0, 1, 2: each sees itself and what is before
                               x Q
                               x x Q
```

A sequence's columns live in blocks of the store, found through its row of the block table: column `c` is in
block `table[c // block_size]` at offset `c % block_size`. A contiguous cache is the same thing with blocks as
long as the longest sequence.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import use_triton
from kernels.paged_attention import paged_attention_triton

# Queries of one sequence whose scores are computed at a time: few enough for a processor's cache, and most of what
# lies above a prompt's diagonal is never computed.
QUERY_BLOCK = 64

# Products are of whole blocks of queries and of columns; what nobody needs is hidden or dropped. A CPU's bfloat16
# product is compiled for every size it meets, which takes longer than the product: sizes must come again.
COLUMN_BLOCK = 64


class Workspace:
    """Memory that keys and values are gathered into, kept from layer to layer and from pass to pass.

    With an allocation each, the operating system would hand out and clear the same tens of megabytes over and over.
    """

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def gather(self, rows: Tensor, *stores: Tensor) -> Tensor:
        """The given rows of every store, [len(stores), rows, width]; good until the next call.

        Args:
            rows: [rows] int64.
            stores: [any, width] each, alike in width, type and device.
        """
        first = stores[0]
        size = len(stores) * len(rows) * first.shape[1]
        held = self._held
        if held is None or held.numel() < size or held.dtype != first.dtype or held.device != first.device:
            held = first.new_empty(size + size // 4)  # more than asked: sequences grow by a column a step
            self._held = held
        gathered = held[:size].view(len(stores), len(rows), first.shape[1])
        for store, out in zip(stores, gathered, strict=True):
            torch.index_select(store, 0, rows, out=out)
        return gathered


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Index tensors for the leading sequences that have one query each: B of them."""

    rows: Tensor  # [Hkv * B * width] of the stores as [..., D], head after head
    width: int
    hidden: Tensor  # [B, 1, width] bool, True = not to be seen


@dataclass(frozen=True, slots=True)
class _QueryBlock:
    """Some neighbouring queries of one sequence: at most QUERY_BLOCK."""

    queries: slice  # rows of the pass
    columns: slice  # of the sequence's gathered ones: whole blocks, with all that any of the queries sees
    hidden: Tensor  # [QUERY_BLOCK, the last so many columns] bool, True = not to be seen; all before are seen


@dataclass(frozen=True, slots=True)
class _PrefillSegment:
    """One sequence with several queries."""

    rows: Tensor  # [Hkv * columns] of the stores as [..., D], head after head
    blocks: tuple[_QueryBlock, ...]


@dataclass(frozen=True, slots=True)
class _VarlenIndices:
    """All sequences' columns one after the other, the form in which varlen kernels take keys."""

    rows: Tensor  # [sum of kv_lengths] rows of the flat store
    query_offsets: Tensor  # [B + 1] int32
    kv_offsets: Tensor  # [B + 1] int32


@dataclass(frozen=True, slots=True)
class _PagedIndices:
    """The leading sequences that have one query each, in the form in which the paged kernel takes them."""

    block_table: Tensor  # [B, N]
    lengths: Tensor  # [B] int32
    max_length: int
    total_length: int


@dataclass(slots=True)
class AttentionLayout:
    """Where the keys of one forward pass lie. Built once a pass; every layer reads it.

    Sequences with one query should come first: they are computed together, the others one by one.

    Attributes:
        block_table: [B, N] int64; entries past a sequence's last block are any valid block.
        block_size: columns in a block.
        query_lengths: queries of each sequence in this pass, B of them, each >= 1.
        kv_lengths: columns of each sequence once this pass has written its own, B of them.
        heads_kv: heads of keys and values in the stores.
        workspace: one that passes share; each has its own if none is given.
    """

    block_table: Tensor
    block_size: int
    query_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    heads_kv: int
    workspace: Workspace = field(default_factory=Workspace)
    # A pass has few distinct windows (none, or none and one), so these hold an entry or two.
    _decode_groups: dict[int | None, _DecodeGroup] = field(default_factory=dict, init=False)
    _prefill_segments: dict[int | None, list[_PrefillSegment]] = field(default_factory=dict, init=False)
    _varlen: _VarlenIndices | None = field(default=None, init=False)
    _paged: _PagedIndices | None = field(default=None, init=False)
    _rest: AttentionLayout | None = field(default=None, init=False)

    @property
    def device(self) -> torch.device:
        return self.block_table.device

    @property
    def num_single(self) -> int:
        """How many leading sequences have exactly one query."""
        for i, length in enumerate(self.query_lengths):
            if length != 1:
                return i
        return len(self.query_lengths)

    def decode_group(self, window: int | None) -> _DecodeGroup:
        if window not in self._decode_groups:
            self._decode_groups[window] = self._build_decode_group(window)
        return self._decode_groups[window]

    def prefill_segments(self, window: int | None) -> list[_PrefillSegment]:
        if window not in self._prefill_segments:
            self._prefill_segments[window] = self._build_prefill_segments(window)
        return self._prefill_segments[window]

    def varlen(self) -> _VarlenIndices:
        if self._varlen is None:
            self._varlen = self._build_varlen()
        return self._varlen

    def paged(self) -> _PagedIndices:
        if self._paged is None:
            self._paged = self._build_paged()
        return self._paged

    def after_singles(self) -> AttentionLayout:
        """The layout of the sequences behind the leading ones of one query."""
        if self._rest is None:
            count = self.num_single
            self._rest = AttentionLayout(
                self.block_table[count:],
                self.block_size,
                self.query_lengths[count:],
                self.kv_lengths[count:],
                self.heads_kv,
                self.workspace,
            )
        return self._rest

    def _rows(self, tables: Tensor, columns: Tensor) -> Tensor:
        """Where these columns lie, head after head: tables [..., N], columns [..., C] -> [Hkv * ... * C].

        Rows of a store seen as [blocks * block_size * Hkv, D]. A head's keys become one matrix this way, read from
        its first number to its last. As they lie in the store, with the other heads' in between, products with them
        take a CPU several times as long.
        """
        rows = tables.gather(-1, columns // self.block_size) * self.block_size + columns % self.block_size
        heads = torch.arange(self.heads_kv, device=self.device)
        return (rows.flatten() * self.heads_kv + heads.unsqueeze(1)).flatten()

    def _build_paged(self) -> _PagedIndices:
        lengths = self.kv_lengths[: self.num_single]
        on_host = torch.tensor(lengths, dtype=torch.int32)
        on_device = on_host.to(self.device, non_blocking=True)  # a plain copy would wait for the device
        return _PagedIndices(self.block_table[: len(lengths)], on_device, max(lengths), sum(lengths))

    def _build_varlen(self) -> _VarlenIndices:
        kv = torch.tensor(self.kv_lengths, device=self.device)
        sequence = torch.repeat_interleave(kv)  # [sum of kv_lengths]: 0, 0, …, 1, 1, …
        columns = torch.arange(sequence.shape[0], device=self.device) - (kv.cumsum(0) - kv)[sequence]
        rows = self.block_table[sequence, columns // self.block_size] * self.block_size
        offsets = [
            torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self.device)
            for lengths in (self.query_lengths, self.kv_lengths)
        ]
        return _VarlenIndices(rows + columns % self.block_size, *offsets)

    def _build_decode_group(self, window: int | None) -> _DecodeGroup:
        count = self.num_single
        lengths = self.kv_lengths[:count]
        visible = [length if window is None else min(length, window) for length in lengths]
        width = _whole_blocks(max(visible))
        kv = torch.tensor(lengths, device=self.device).unsqueeze(1)  # [B, 1]
        first = torch.tensor([n - m for n, m in zip(lengths, visible, strict=True)], device=self.device)
        columns = first.unsqueeze(1) + torch.arange(width, device=self.device)  # [B, width]
        hidden = (columns >= kv).unsqueeze(1)  # past a sequence's end
        # Hidden columns weigh nothing, but 0 × NaN is NaN: past its end, a sequence reads its own last column.
        rows = self._rows(self.block_table[:count], torch.minimum(columns, kv - 1))
        return _DecodeGroup(rows, width, hidden)

    def _build_prefill_segments(self, window: int | None) -> list[_PrefillSegment]:
        segments: list[_PrefillSegment] = []
        count = self.num_single
        row = count
        for i in range(count, len(self.query_lengths)):
            queries, end = self.query_lengths[i], self.kv_lengths[i]
            start = end - queries
            first = _first_read(start, window)
            columns = torch.arange(first, first + _whole_blocks(end - first), device=self.device)
            columns.clamp_(max=end - 1)  # past its end, a sequence reads its own last column
            blocks = tuple(
                self._query_block(at, min(at + QUERY_BLOCK, end), window, row - start, first)
                for at in range(start, end, QUERY_BLOCK)
            )
            segments.append(_PrefillSegment(self._rows(self.block_table[i], columns), blocks))
            row += queries
        return segments

    def _query_block(
        self, start: int, end: int, window: int | None, row_of_0: int, first_column: int
    ) -> _QueryBlock:
        """The queries at positions `start` to `end`, in a pass where position 0 would be row `row_of_0`."""
        first = _first_read(start, window)
        last = first + _whole_blocks(end - first)
        # What came before these queries is seen by all of them, unless a window leaves it behind.
        left_behind = window is not None and end - first > window
        columns = torch.arange(first if left_behind else start, last, device=self.device)
        # What fills the block behind the last query is to see something, or its softmax would divide by zero.
        positions = torch.arange(start, start + QUERY_BLOCK, device=self.device).clamp_(max=end - 1)
        distance = positions.unsqueeze(1) - columns  # p - c
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        return _QueryBlock(
            queries=slice(row_of_0 + start, row_of_0 + end),
            columns=slice(first - first_column, last - first_column),
            hidden=hidden,
        )


def _first_read(position: int, window: int | None) -> int:
    """Where the block of columns begins in which the first one lies that a query at `position` sees."""
    first_seen = 0 if window is None else max(0, position - window + 1)
    return first_seen // COLUMN_BLOCK * COLUMN_BLOCK


def _whole_blocks(columns: int) -> int:
    return -(-columns // COLUMN_BLOCK) * COLUMN_BLOCK


def paged_attention_reference(
    q: Tensor, k_store: Tensor, v_store: Tensor, layout: AttentionLayout, *, scale: float, window: int | None
) -> Tensor:
    """Attention by gathering keys and values through the block table, and three operations. Any device.

    Args:
        q: [T, Hq, D], sequence after sequence.
        k_store, v_store: [blocks, block_size, Hkv, D], the pass's own keys and values already written.
        scale: factor on the scores.
        window: how many latest columns a query sees, its own included; None: all.

    Returns:
        [T, Hq, D].
    """
    heads_kv, head_dim = k_store.shape[-2:]
    assert heads_kv == layout.heads_kv
    k_rows, v_rows = k_store.view(-1, head_dim), v_store.view(-1, head_dim)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    singles = layout.num_single
    if singles:
        group = layout.decode_group(window)
        gathered = layout.workspace.gather(group.rows, k_rows, v_rows)
        out[:singles] = _decode(q[:singles], gathered, group, heads_kv, scale)
    if singles < q.shape[0]:
        for segment in layout.prefill_segments(window):
            gathered = layout.workspace.gather(segment.rows, k_rows, v_rows)
            k, v = gathered.view(2, heads_kv, -1, head_dim)
            for block in segment.blocks:
                seen = block.columns
                out[block.queries] = _prefill(q[block.queries], k[:, seen], v[:, seen], block.hidden, scale)
    return out


def _decode(q: Tensor, gathered: Tensor, group: _DecodeGroup, heads_kv: int, scale: float) -> Tensor:
    """One query a sequence, all sequences in one call: [B, Hq, D] -> [B, Hq, D].

    Keys and values: [2, Hkv * B * width, D]. The query heads that share a KV head become the rows of one small
    matrix, so keys are read once per KV head.
    """
    batch, heads, head_dim = q.shape
    k, v = gathered.view(2, heads_kv * batch, group.width, head_dim)
    folded = q.view(batch, heads_kv, heads // heads_kv, head_dim).transpose(0, 1)
    return _weigh(folded, k, v, group.hidden, scale).transpose(0, 1).reshape(batch, heads, head_dim)


def _prefill(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """At most QUERY_BLOCK queries of one sequence: [Tq, Hq, D] -> [Tq, Hq, D].

    Its keys and values: [Hkv, columns, D]. All queries of all heads that share a KV head become the rows of one
    matrix.
    """
    length, heads, head_dim = q.shape
    heads_kv = k.shape[0]
    whole = F.pad(q, (0, 0, 0, 0, 0, QUERY_BLOCK - length))
    folded = whole.view(QUERY_BLOCK, heads_kv, heads // heads_kv, head_dim).permute(1, 2, 0, 3)
    out = _weigh(folded, k, v, hidden, scale).permute(2, 0, 1, 3)
    return out[:length].reshape(length, heads, head_dim)


def _weigh(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """softmax(q kᵀ · scale) v, in so many words.

    Two plain products reach a CPU's bfloat16 instructions. The fused kernel of `scaled_dot_product_attention` does
    not (torch 2.13): in bfloat16 it is no faster than in float32. Scores are rounded to the type of `q` in between.

    Args:
        q: [X, Y, Z, D], of which every N-th part meets one matrix of keys.
        k, v: [N, S, D].
        hidden: what not to see, to be broadcast to the last columns of [X, Y, Z, S].

    Returns:
        As `q`.
    """
    matrices, columns, head_dim = k.shape
    rows = q.reshape(matrices, -1, head_dim)
    scores = torch.baddbmm(q.new_empty(()), rows, k.transpose(1, 2), beta=0, alpha=scale)  # beta: add nothing
    scores.view(*q.shape[:3], columns)[..., -hidden.shape[-1] :].masked_fill_(hidden, -torch.inf)
    return torch.bmm(scores.softmax(-1), v).view(q.shape)


def varlen_attention(
    q: Tensor, k_store: Tensor, v_store: Tensor, layout: AttentionLayout, *, scale: float, window: int | None
) -> Tensor:
    """The same attention in one FlashAttention launch over gathered keys (CUDA, float16 and bfloat16).

    Arguments and result as in `paged_attention_reference`.
    """
    from torch.nn.attention.varlen import varlen_attn

    heads_kv, head_dim = k_store.shape[-2:]
    indices = layout.varlen()
    out = varlen_attn(
        q.contiguous(),
        k_store.view(-1, heads_kv, head_dim).index_select(0, indices.rows),
        v_store.view(-1, heads_kv, head_dim).index_select(0, indices.rows),
        indices.query_offsets,
        indices.kv_offsets,
        max(layout.query_lengths),
        max(layout.kv_lengths),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != heads_kv,
    )
    assert isinstance(out, Tensor)  # a pair only where auxiliary results are asked for
    return out


@functools.cache
def _varlen_works(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Try the varlen kernel once on a small mixed pass: which builds and cards have it is not to be told else."""
    try:
        generator = torch.Generator(device).manual_seed(0)
        draw = functools.partial(torch.randn, device=device, dtype=dtype, generator=generator)
        layout = AttentionLayout(torch.tensor([[1], [0]], device=device), 16, (1, 5), (7, 9), heads_kv=2)
        q, k, v = draw(6, 4, head_dim), draw(2, 16, 2, head_dim), draw(2, 16, 2, head_dim)
        for window in (None, 4):
            got = varlen_attention(q, k, v, layout, scale=head_dim**-0.5, window=window)
            expected = paged_attention_reference(q, k, v, layout, scale=head_dim**-0.5, window=window)
            if not torch.allclose(got, expected, atol=3e-2, rtol=3e-2):
                return False
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return True


def attention(
    q: Tensor, k_store: Tensor, v_store: Tensor, layout: AttentionLayout, *, scale: float, window: int | None
) -> Tensor:
    """Attention over the block store; arguments and result as in `paged_attention_reference`.

    This is the one place that chooses. With Triton, on CUDA, the leading sequences of one query take the paged
    kernel, which reads their keys where they lie. Sequences with several queries, on CUDA, take FlashAttention's
    varlen kernel where a probe on this machine has shown it to work. All else takes the torch reference.
    """
    singles = layout.num_single
    decode = singles if use_triton(q) else 0
    if decode == q.shape[0]:
        return _paged_decode(q, k_store, v_store, layout, scale=scale, window=window)
    several = paged_attention_reference
    if q.is_cuda and singles < q.shape[0] and _varlen_works(q.device, q.dtype, q.shape[2]):
        several = varlen_attention
    if decode == 0:
        return several(q, k_store, v_store, layout, scale=scale, window=window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    out[:decode] = _paged_decode(q[:decode], k_store, v_store, layout, scale=scale, window=window)
    rest = layout.after_singles()
    out[decode:] = several(q[decode:], k_store, v_store, rest, scale=scale, window=window)
    return out


def _paged_decode(
    q: Tensor, k_store: Tensor, v_store: Tensor, layout: AttentionLayout, *, scale: float, window: int | None
) -> Tensor:
    """The leading sequences of one query by the Triton kernel: [B, Hq, D] -> [B, Hq, D]."""
    indices = layout.paged()
    return paged_attention_triton(
        q,
        k_store,
        v_store,
        indices.block_table,
        indices.lengths,
        scale=scale,
        window=window,
        max_length=indices.max_length,
        total_length=indices.total_length,
    )
