"""Attention that reads keys and values in place, through the block table: decode, chunks of prompts, guesses.

A decode step has one query per sequence. It must read every visible key and value once, so a GPU's memory bandwidth
sets the time. Gathering the blocks into one tensor first would read, write and read them again.
PagedAttention (Kwon et al., 2023) walks the block table inside the kernel instead.

One program computes one tile of queries of a sequence, for one KV head:

```text
  sequence b: 9 columns, blocks of 4                  block table row b:  [ 7 | 2 | 5 ]

  columns                      0 1 2 3   4 5 6 7   8 . . .          . = past the last query: never loaded
  found in the store           block 7   block 2   block 5
  tiles of columns            |---- tile 0 ---|---- tile 1 ---|     tiles and blocks need not line up: every column
                                                                    of a tile looks up its own block and offset

  one tile, for one KV head, n queries, and the G query heads that share the KV head:

      q [n G, D] · k^T [D, C]  ->  scores [n G, C]  ->  weights [n G, C] · v [C, D]  ->  added to sums [n G, D]
```

The G query heads of a group are rows of one matrix, so grouped queries read their shared keys once. The softmax is
online (Milakov & Gimelshein, 2018; FlashAttention, Dao et al., 2022): a program keeps, per row, the largest score
so far, the sum of weights and the weighted sum of values, and rescales both sums when it finds a larger score.
Scores are never written to memory.

**A row's bits depend on its own sequence alone.** Columns are computed in splits of `SPLIT_COLUMNS`, counted from
column 0, and a row's splits are merged in order, in whichever kernel:

```text
                  columns 0 ........ 511 | 512 ...... 1023 | 1024 ... 1300
      splits      |------- 0 ------------|------- 1 -------|----- 2 -----|
      each leaves   top_0, total_0, sums_0   ..._1             ..._2
      merged        ((0 with 1) with 2), then sums / total
```

A decoding sequence has few rows, so its splits are divided among several programs, and a second, small kernel
merges them (flash-decoding, Dao et al., 2023). A prompt has many tiles, so a program computes all splits of
its tile and merges them in registers. A decode pass has few rows, so its tiles have few rows. All other
passes have larger tiles.

A row's numbers are computed alike in tiles of any shape. A tensor core adds the products of an output in the
order of their columns. The largest score is the same in any order. An ordinary sum of weights would not be,
so the sum is computed as a product with columns of ones. And the compiler may not fuse a product with a sum.
So a token that is decoded, prefilled in any chunk, or verified as a guess gets the same bits. A column that
is hidden from a row has a weight of 0, which changes no bit.

Positions are read on the device. So a short sequence beside a long one costs little more than alone, and a captured
launch may be replayed while its sequences grow.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention_layout import PagedIndices
from kernels.dispatch import HAS_TRITON, device_guard
from kernels.overlap import early_launch

if HAS_TRITON:
    import triton
    import triton.language as tl

    from kernels.overlap import wait_for_inputs

#: A window that hides nothing: `position - NO_WINDOW` is negative for any position, and still an int32.
NO_WINDOW = 2**31 - 1

#: Columns of a split, a multiple of every tile's columns. Results depend on it: see the module.
SPLIT_COLUMNS = 512

#: A launch of up to this many programs leaves processors idle (an NVIDIA H200 has 132).
FEW_PROGRAMS = 128

#: The most programs that share the splits of a tile. Beyond it, a program computes several splits.
MOST_PROGRAMS = 32


# --- torch ---------------------------------------------------------------------------------------------


def paged_attention_reference(
    q: Tensor, k_store: Tensor, v_store: Tensor, indices: PagedIndices, *, scale: float, window: int | None
) -> Tensor:
    """Compute the kernel's result in torch, one query at a time, in float32. On CUDA the host waits.

    For reading and for tests. Without Triton, `kernels.attention.attention` uses other implementations.

    Arguments and result as in `paged_attention_triton`.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    block_size, heads_kv, head_dim = k_store.shape[1:]
    for sequence, first, count in indices.tiles.tolist():
        for row in range(first, first + count):
            position = int(indices.positions[row])
            start = 0 if window is None else max(0, position - window + 1)
            columns = torch.arange(start, position + 1, device=q.device)
            blocks, offsets = (
                indices.block_table[sequence, columns // block_size].long(),
                columns % block_size,
            )
            k = k_store[blocks, offsets].float()  # [columns, Hkv, D]
            v = v_store[blocks, offsets].float()
            folded = q[row].float().view(heads_kv, -1, head_dim)
            scores = torch.einsum("hgd,chd->hgc", folded, k) * scale
            out[row] = torch.einsum("hgc,chd->hgd", scores.softmax(-1), v).reshape(-1, head_dim).to(q.dtype)
    return out


# --- Triton --------------------------------------------------------------------------------------------

if HAS_TRITON:

    @triton.jit
    def _weigh(weights, v):  # type: ignore[no-untyped-def]  # Triton has no types
        """Multiply weights [R, C] float32 by v [C, D] -> [R, D] float32.

        If v is float32, this is one product. Otherwise tensor cores need the weights in v's type, and rounding them
        would lose as much precision as rounding the result. So two products are added: of the rounded weights, and
        of their rounding errors. In decode, the second product takes no extra time, since loading v takes longer
        than both.
        """
        if v.dtype == tl.float32:
            return tl.dot(weights, v, input_precision="ieee")
        rounded = weights.to(v.dtype)
        rest = (weights - rounded.to(tl.float32)).to(v.dtype)
        return tl.dot(rest, v, acc=tl.dot(rounded, v))

    @triton.jit
    def _base(top):  # type: ignore[no-untyped-def]  # Triton has no types
        """Return the number to subtract from each row's scores, [R]: its largest score, or 0 if it has none yet."""
        return tl.where(top == float("-inf"), 0.0, top)

    @triton.jit
    def _merge(top, total, sums, split_top, split_total, split_sums):  # type: ignore[no-untyped-def]  # Triton has no types
        """Merge a split into the splits before it: [R], [R], [R, D] each. A split that a row cannot see changes no
        bit of the row: its weight is 0, and the factor of the splits before it is 1."""
        new_top = tl.maximum(top, split_top)
        shrink = tl.exp2(top - _base(new_top))
        weight = tl.exp2(split_top - _base(new_top))
        total = total * shrink + split_total * weight
        sums = sums * shrink[:, None] + split_sums * weight[:, None]
        return new_top, total, sums

    # An argument that changes from step to step must not be a constant or be specialised on, or a serving engine
    # keeps compiling. (By default Triton specialises on 1 and on multiples of 16.) `block_size` changes, too: a
    # block may be as long as a batch's longest sequence. Strides stay specialised: only if they are known to be
    # multiples of 16 can 16 bytes be loaded at a time.
    @triton.jit(do_not_specialize=["window", "num_splits", "split_rows", "block_size", "table_stride"])  # type: ignore[untyped-decorator]  # Triton has no types
    def _paged_attention_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        q_ptr,
        k_ptr,
        v_ptr,
        table_ptr,
        positions_ptr,
        tiles_ptr,
        out_ptr,
        partial_ptr,
        tops_ptr,
        totals_ptr,
        scale_log2,
        window,
        num_splits,
        split_rows,
        block_size,
        q_stride,
        q_head_stride,
        block_stride,
        column_stride,
        kv_head_stride,
        table_stride,
        group: tl.constexpr,
        head_dim: tl.constexpr,
        split_columns: tl.constexpr,
        tile_rows: tl.constexpr,
        tile_columns: tl.constexpr,
        tile_dim: tl.constexpr,
        decodes: tl.constexpr,
        early: tl.constexpr,
    ):
        """Program (i, h, z) computes tile i for the query heads that share KV head h: all its splits, or, if the
        tile is split, the splits z, z + programs, … of them."""
        wait_for_inputs(early)
        # 64-bit, because block * stride passes 2^31 in any store of more than 4 GB.
        tile = tiles_ptr + 3 * tl.program_id(0)
        sequence = tl.load(tile).to(tl.int64)
        if decodes:  # tile i is query i: its position need not wait for the tile to be loaded
            first_row = tl.program_id(0).to(tl.int64)
            count = 1
        else:
            first_row = tl.load(tile + 1).to(tl.int64)
            count = tl.load(tile + 2)
        start = tl.load(positions_ptr + first_row).to(tl.int32)
        end = start + count

        first = tl.maximum(start - window + 1, 0)  # the first column that the first query sees
        is_split = first_row < split_rows
        step = tl.where(is_split, tl.num_programs(2), 1)
        begin = first // split_columns + tl.program_id(2)
        if tl.program_id(2) >= step or begin * split_columns >= end:
            return  # this tile has fewer splits than there are programs

        kv_head = tl.program_id(1).to(tl.int64)
        rows = tl.arange(0, tile_rows)
        queries = rows // group
        positions = start + queries
        heads = kv_head * group + rows % group
        dims = tl.arange(0, tile_dim)
        row_mask = queries < count
        mask = row_mask[:, None] & (dims < head_dim)[None, :]
        q = q_ptr + (first_row + queries)[:, None] * q_stride + heads[:, None] * q_head_stride + dims[None, :]
        q = tl.load(q, mask=mask, other=0.0)
        places = (first_row + queries) * (tl.num_programs(1) * group) + heads  # of the rows in [T, Hq]
        table = table_ptr + sequence * table_stride
        k_head = k_ptr + kv_head * kv_head_stride
        v_head = v_ptr + kv_head * kv_head_stride

        all_top = tl.full([tile_rows], float("-inf"), tl.float32)
        all_total = tl.zeros([tile_rows], tl.float32)
        all_sums = tl.zeros([tile_rows, tile_dim], tl.float32)
        for split in range(begin, tl.cdiv(end, split_columns), step):
            top = tl.full([tile_rows], float("-inf"), tl.float32)
            total = tl.zeros([tile_rows], tl.float32)
            sums = tl.zeros([tile_rows, tile_dim], tl.float32)
            low = tl.maximum(split * split_columns, first // tile_columns * tile_columns)
            for column in range(low, tl.minimum((split + 1) * split_columns, end), tile_columns):
                columns = column + tl.arange(0, tile_columns)
                # Columns that no row sees must not be loaded: 0 * NaN is NaN, so a weight of 0 does not hide them.
                inside = (columns >= first) & (columns < end)
                block = tl.load(table + columns // block_size, mask=inside, other=0).to(tl.int64)
                address = block * block_stride + (columns % block_size).to(tl.int64) * column_stride
                offsets = address[:, None] + dims[None, :]
                kv_mask = inside[:, None] & (dims < head_dim)[None, :]

                k = tl.load(k_head + offsets, mask=kv_mask, other=0.0)
                # The hardware computes powers of two: exp(x) = 2^(x * log2(e)). The factor is part of the scale.
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
                distance = positions[:, None] - columns[None, :]
                seen = inside[None, :] & (distance >= 0) & (distance < window)
                scores = tl.where(seen, scores, float("-inf"))
                new_top = tl.maximum(top, tl.max(scores, axis=1))
                shrink = tl.exp2(top - _base(new_top))
                weights = tl.exp2(scores - _base(new_top)[:, None])
                v = tl.load(v_head + offsets, mask=kv_mask, other=0.0)
                sums = sums * shrink[:, None] + _weigh(weights, v)
                # A product has at least 16 columns, and all of these are equal.
                ones = tl.full([tile_columns, 16], 1.0, tl.float32).to(v.dtype)
                total = total * shrink + tl.max(_weigh(weights, ones), axis=1)
                top = new_top
            if is_split:
                at = places * num_splits + split % num_splits
                tl.store(partial_ptr + at[:, None] * head_dim + dims[None, :], sums, mask=mask)
                tl.store(tops_ptr + at, top, mask=row_mask)
                tl.store(totals_ptr + at, total, mask=row_mask)
            else:
                all_top, all_total, all_sums = _merge(all_top, all_total, all_sums, top, total, sums)
        if not is_split:
            out = (all_sums / all_total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + places[:, None] * head_dim + dims[None, :], out, mask=mask)

    @triton.jit(do_not_specialize=["window", "num_splits"])  # type: ignore[untyped-decorator]  # Triton has no types
    def _merge_splits_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        partial_ptr,
        tops_ptr,
        totals_ptr,
        positions_ptr,
        out_ptr,
        window,
        num_splits,
        head_dim: tl.constexpr,
        split_columns: tl.constexpr,
        tile_dim: tl.constexpr,
        early: tl.constexpr,
    ):
        """Program (t, h) merges the splits of query head h of row t, in order."""
        wait_for_inputs(early)
        row = tl.program_id(0).to(tl.int64)
        place = row * tl.num_programs(1) + tl.program_id(1)
        position = tl.load(positions_ptr + row).to(tl.int32)
        first = tl.maximum(position - window + 1, 0) // split_columns
        last = position // split_columns

        dims = tl.arange(0, tile_dim)
        one = tl.arange(0, 1)
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        sums = tl.zeros([1, tile_dim], tl.float32)
        for start in range(first, last + 1, 8):
            for i in tl.static_range(8):  # unrolled: the loads of eight splits are under way together
                inside = one + start + i <= last
                at = place * num_splits + (start + i) % num_splits
                split_top = tl.load(tops_ptr + at + one, mask=inside, other=float("-inf"))
                split_total = tl.load(totals_ptr + at + one, mask=inside, other=0.0)
                mask = inside[:, None] & (dims < head_dim)[None, :]
                split_sums = tl.load(partial_ptr + at * head_dim + dims[None, :], mask=mask, other=0.0)
                top, total, sums = _merge(top, total, sums, split_top, split_total, split_sums)
        out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place * head_dim + dims[None, :], out, mask=(dims < head_dim)[None, :])


def paged_attention_triton(
    q: Tensor, k_store: Tensor, v_store: Tensor, indices: PagedIndices, *, scale: float, window: int | None
) -> Tensor:
    """Compute attention by the position rule. Keys and values are read through the block table.

    A query at position `p` sees columns `c <= p` of its sequence, and of these only the latest `window`. Column `c`
    of sequence `b` is in block `block_table[b, c // block_size]` at offset `c % block_size`. Nothing here waits for
    the device: shapes and the number of splits follow from integers that the host has.

    Args:
        q: [T, Hq, D] float32, bfloat16 or float16. Last dimension contiguous or it is copied.
        k_store, v_store: [blocks, block_size, Hkv, D], dtype of `q`, the same strides, last dimension contiguous.
            Hq is a multiple of Hkv. Columns that no query sees are not read.
        indices: the queries' positions, tiles of at most `queries_per_tile` queries, and block tables. Entries past
            a sequence's last block are not read. `max_length` bounds the columns of every split row.
        scale: factor on the scores.
        window: number of latest columns that a query sees, its own included, >= 1; None: all.

    Returns:
        [T, Hq, D], contiguous, dtype of `q`.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit together, or a window below 1.
    """
    _check(q, k_store, v_store, indices, window)
    _, heads, head_dim = q.shape
    block_size, heads_kv = k_store.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out  # nothing to launch
    q = q if q.stride(2) == 1 else q.contiguous()
    table = indices.block_table if indices.block_table.stride(1) == 1 else indices.block_table.contiguous()
    positions = indices.positions.contiguous()
    group = heads // heads_kv
    decodes = indices.tile_queries == 1
    # The columns that the queries of a tile see may begin and end within a split.
    most = indices.max_length if window is None else window + indices.tile_queries - 1 + SPLIT_COLUMNS - 1
    num_splits = -(-min(most, indices.max_length) // SPLIT_COLUMNS)
    split_rows = indices.split_rows if num_splits > 1 else 0
    programs = min(num_splits, MOST_PROGRAMS) if split_rows else 1
    decoding = (len(indices.tiles) * heads_kv, programs) if decodes else None
    tile = _tile(group, head_dim, q.dtype.itemsize, decoding)
    window = NO_WINDOW if window is None else min(window, NO_WINDOW)
    partial = torch.empty(split_rows, heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    tops, totals = torch.empty(2, split_rows, heads, num_splits, dtype=torch.float32, device=q.device)
    with device_guard(q):
        _paged_attention_kernel[(len(indices.tiles), heads_kv, programs)](
            q,
            k_store,
            v_store,
            table,
            positions,
            indices.tiles,
            out,
            partial,
            tops,
            totals,
            scale * 1.4426950408889634,  # log2(e)
            window,
            num_splits,
            split_rows,
            block_size,
            q.stride(0),
            q.stride(1),
            k_store.stride(0),
            k_store.stride(1),
            k_store.stride(2),
            table.stride(0),
            group=group,
            head_dim=head_dim,
            split_columns=SPLIT_COLUMNS,
            tile_rows=tile.rows,
            tile_columns=tile.columns,
            tile_dim=tile.dims,
            decodes=decodes,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **early_launch(q.device),
            enable_fp_fusion=False,  # or the two kernels could round a merge differently
        )
        if split_rows:
            _merge_splits_kernel[(split_rows, heads)](
                partial,
                tops,
                totals,
                positions,
                out,
                window,
                num_splits,
                head_dim=head_dim,
                split_columns=SPLIT_COLUMNS,
                tile_dim=tile.dims,
                num_warps=1,
                **early_launch(q.device),
                enable_fp_fusion=False,
            )
    return out


def queries_per_tile(group: int, dtype: torch.dtype) -> int:
    """Return the most queries of a tile in passes that compute prompts or guesses.

    Args:
        group: number of query heads that share a KV head.
        dtype: type of queries, keys and values.
    """
    return _tile(group, 16, dtype.itemsize, None).rows // group


class _Tile(NamedTuple):
    """A tile's rows, columns and padded dimensions; the warps of its program; and the tiles of columns that the
    program holds at a time, including those that are being loaded."""

    rows: int
    columns: int
    dims: int
    warps: int
    stages: int


@functools.cache
def _tile(group: int, head_dim: int, itemsize: int, decoding: tuple[int, int] | None) -> _Tile:
    """Return a program's tile. A query of one head is a row.

    Tile sides are powers of two, and at least 16 for `tl.dot`. A model's tiles have equally many columns in all
    passes, since sums are rescaled after each tile, which rounds. In decode a sequence has a row for each head of a
    group, and loads take the time: one warp computes a tile, so that many programs run at once. If few programs
    run, more warps shorten the time of each. A captured pass only knows a bound of its sequences' lengths, so many
    of its programs may have no split to compute. If the programs with a split may be few or many, two warps lose
    the least. Other passes have many rows, which share the loads. In float32, which has no tensor cores, few rows
    are best in all passes. The numbers are the fastest on an NVIDIA H200.

    Args:
        decoding: for a pass that only decodes: sequences times KV heads, and the programs that share the splits of
            each. None: any other pass.
    """
    few = decoding is not None or itemsize == 4
    rows = max(16 if few else 64, _power_of_2(group))
    dims = max(16, _power_of_2(head_dim))
    columns = min(64, max(16, 8192 // (dims * itemsize)))
    warps = min(8, max(1, rows * dims // 2048) if few else 4 if rows * dims < 16384 else 8)
    if decoding is None or decoding[0] > FEW_PROGRAMS:
        return _Tile(rows, columns, dims, warps, stages=3)
    least = 4 if math.prod(decoding) <= FEW_PROGRAMS else 2
    return _Tile(rows, columns, dims, max(least, warps), stages=2)


def _power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _check(q: Tensor, k_store: Tensor, v_store: Tensor, indices: PagedIndices, window: int | None) -> None:
    tokens, heads, head_dim = q.shape
    block_table, positions, tiles = indices.block_table, indices.positions, indices.tiles
    if k_store.shape != v_store.shape or k_store.dim() != 4 or k_store.shape[3] != head_dim:
        raise ValueError(
            f"k_store {list(k_store.shape)} and v_store {list(v_store.shape)} must both be "
            f"[blocks, block_size, KV heads, {head_dim}], the last being q's head size"
        )
    if heads % k_store.shape[2]:
        raise ValueError(f"{heads} query heads cannot share {k_store.shape[2]} KV heads evenly")
    if q.dtype != k_store.dtype or q.dtype != v_store.dtype:
        raise ValueError(
            f"q {q.dtype}, k_store {k_store.dtype} and v_store {v_store.dtype} must have one dtype"
        )
    if k_store.stride() != v_store.stride() or k_store.stride(3) != 1:
        raise ValueError(
            f"k_store and v_store must have the same strides, 1 in the last dimension, but have "
            f"{k_store.stride()} and {v_store.stride()}"
        )
    if block_table.dim() != 2 or positions.shape != (tokens,) or tiles.shape[1:] != (3,):
        raise ValueError(
            f"block_table {list(block_table.shape)} must be [B, N], positions {list(positions.shape)} [{tokens}], "
            f"one for each query, and tiles {list(tiles.shape)} [I, 3]"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, a query always sees its own column, but is {window}")
