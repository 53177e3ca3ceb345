"""Decode attention that reads keys and values in place, through the block table.

A decode step has one query per sequence. It must read every visible key and value once, so a GPU's memory bandwidth
sets the time. Gathering the blocks into one tensor first would read, write and read them again.
PagedAttention (Kwon et al., 2023) walks the block table inside the kernel instead.

One program computes one (sequence, KV head, split) and walks its columns in tiles:

```text
  sequence b: length 9, blocks of 4 columns           block table row b:  [ 7 | 2 | 5 ]

  columns                      0 1 2 3   4 5 6 7   8 . . .          . = past the length: never loaded
  found in the store           block 7   block 2   block 5
  tiles of a program          |---- tile 0 ---|---- tile 1 ---|     tiles and blocks need not line up: every column
                                                                    of a tile looks up its own block and offset

  one tile, for one KV head and the G query heads that share it:

      q [G, D] · k^T [D, C]  ->  scores [G, C]  ->  weights [G, C] · v [C, D]  ->  added to sums [G, D]
```

The G query heads of a group are rows of one small matrix, so grouped queries read their shared keys once. The
softmax is online (Milakov & Gimelshein, 2018; FlashAttention, Dao et al., 2022): a program keeps, per query head,
the largest score so far, the sum of weights and the weighted sum of values, and rescales both sums when it finds a
larger score. Scores are never written to memory.

A few long sequences give fewer programs than a GPU has processors. Their columns are then split (flash-decoding,
Dao et al., 2023): every split writes its own normalised result and the logarithm of its sum of weights, and a
second, small kernel merges them:

```text
                  columns 0 ..................................... length
      splits      |------ 0 ------|------ 1 ------|---- 2 ----|
      each leaves   out_0, log_0     out_1, log_1   out_2, log_2
      merged        out = sum of exp(log_s) * out_s  /  sum of exp(log_s)
```

Each program reads its sequence's length on the device. So a short sequence beside a long one costs as much as
alone, and the splits of a sequence always cover all of it, even if the host assumed a wrong longest length.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernels.dispatch import HAS_TRITON, device_guard

if HAS_TRITON:
    import triton
    import triton.language as tl

#: A window that hides nothing: `length - NO_WINDOW` is not positive for any length, and still an int32.
NO_WINDOW = 2**31 - 1

#: The fewest columns of a split: for fewer, writing, reading and merging the partial result costs too much.
MIN_SPLIT_COLUMNS = 256

#: Programs for each of a GPU's processors: one computes while others wait for memory.
PROGRAMS_PER_PROCESSOR = 2


# --- torch ---------------------------------------------------------------------------------------------


def paged_attention_reference(
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Compute the kernel's result in torch, one sequence at a time, in float32. On CUDA the host waits.

    For reading and for tests. Without Triton, `kernels.attention.gathered_attention` runs instead: all sequences at
    once, with indices built once a pass.

    Arguments and result as in `paged_attention_triton`.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    block_size, heads_kv, head_dim = k_store.shape[1:]
    group = q.shape[1] // heads_kv
    for i, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        columns = torch.arange(0 if window is None else max(0, length - window), length, device=q.device)
        blocks, offsets = block_table[i, columns // block_size].long(), columns % block_size
        k = k_store[blocks, offsets].float()  # [columns, Hkv, D]
        v = v_store[blocks, offsets].float()
        folded = q[i].float().view(heads_kv, group, head_dim)
        scores = torch.einsum("hgd,chd->hgc", folded, k) * scale
        out[i] = torch.einsum("hgc,chd->hgd", scores.softmax(-1), v).reshape(-1, head_dim).to(q.dtype)
    return out


# --- Triton --------------------------------------------------------------------------------------------

if HAS_TRITON:

    @triton.jit
    def _visible(length, window, num_splits, min_split, tile_columns):  # type: ignore[no-untyped-def]  # Triton has no types
        """Return (first visible column, columns of a split: whole tiles, the same for all splits of a sequence)."""
        first = tl.maximum(length - window, 0)
        tiles = tl.cdiv(length - first, tile_columns)
        return first, tl.maximum(tl.cdiv(tiles, num_splits) * tile_columns, min_split)

    @triton.jit
    def _weigh(weights, v):  # type: ignore[no-untyped-def]  # Triton has no types
        """Multiply weights [G, C] float32 by v [C, D] -> [G, D] float32.

        Tensor cores need both factors in one type. Rounding the weights to bfloat16 would lose as much precision as
        rounding the result. So they are multiplied in two parts: the rounded weights, and the rounding error. The
        second product takes no extra time, since loads take longer.
        """
        if v.dtype == tl.float32:
            return tl.dot(weights, v, input_precision="ieee")
        rounded = weights.to(v.dtype)
        rest = (weights - rounded.to(tl.float32)).to(v.dtype)
        return tl.dot(rest, v, acc=tl.dot(rounded, v))

    # An argument that changes from step to step must not be a constant or be specialised on, or a serving engine
    # keeps compiling. (By default Triton specialises on 1 and on multiples of 16.) `block_size` changes, too: a
    # block may be as long as a batch's longest sequence. Strides stay specialised: only if they are known to be
    # multiples of 16 can 16 bytes be loaded at a time.
    @triton.jit(do_not_specialize=["window", "num_splits", "min_split", "block_size", "table_stride"])  # type: ignore[untyped-decorator]  # Triton has no types
    def _paged_attention_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        q_ptr,
        k_ptr,
        v_ptr,
        table_ptr,
        lengths_ptr,
        out_ptr,
        log_sums_ptr,
        scale_log2,
        window,
        num_splits,
        min_split,
        group,
        block_size,
        q_stride,
        q_head_stride,
        block_stride,
        column_stride,
        kv_head_stride,
        table_stride,
        head_dim: tl.constexpr,
        is_split: tl.constexpr,
        tile_rows: tl.constexpr,
        tile_columns: tl.constexpr,
        tile_dim: tl.constexpr,
    ):
        """Program (b, h, s) computes split s of sequence b for the query heads that share KV head h."""
        # 64-bit, because block * stride passes 2^31 in any store of more than 4 GB.
        sequence = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1).to(tl.int64)
        split = tl.program_id(2)

        length = tl.load(lengths_ptr + sequence).to(tl.int32)
        first, share = _visible(length, window, num_splits, min_split, tile_columns)
        begin = first + split * share
        end = tl.minimum(begin + share, length)
        if is_split and begin >= end:
            return  # no columns left for this split; the merge skips it

        rows = tl.arange(0, tile_rows)
        dims = tl.arange(0, tile_dim)
        heads = kv_head * group + rows
        head_mask = (rows < group)[:, None] & (dims < head_dim)[None, :]
        q = q_ptr + sequence * q_stride + heads[:, None] * q_head_stride + dims[None, :]
        q = tl.load(q, mask=head_mask, other=0.0)
        table = table_ptr + sequence * table_stride
        k_head = k_ptr + kv_head * kv_head_stride
        v_head = v_ptr + kv_head * kv_head_stride

        top = tl.full([tile_rows], float("-inf"), tl.float32)
        total = tl.zeros([tile_rows], tl.float32)
        sums = tl.zeros([tile_rows, tile_dim], tl.float32)
        for start in range(begin, end, tile_columns):
            columns = start + tl.arange(0, tile_columns)
            inside = columns < end
            block = tl.load(table + columns // block_size, mask=inside, other=0).to(tl.int64)
            address = block * block_stride + (columns % block_size).to(tl.int64) * column_stride
            offsets = address[:, None] + dims[None, :]
            # Columns outside must not be loaded: 0 * NaN is NaN, so a weight of zero does not hide them.
            mask = inside[:, None] & (dims < head_dim)[None, :]

            k = tl.load(k_head + offsets, mask=mask, other=0.0)
            # The hardware computes powers of two: exp(x) = 2^(x * log2(e)). The factor is part of the scale.
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            scores = tl.where(inside[None, :], scores, float("-inf"))
            # A tile has at least one column inside, so the maximum is finite from the first one on.
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            shrink = tl.exp2(top - new_top)
            weights = tl.exp2(scores - new_top[:, None])
            total = total * shrink + tl.sum(weights, axis=1)
            v = tl.load(v_head + offsets, mask=mask, other=0.0)
            sums = sums * shrink[:, None] + _weigh(weights, v)
            top = new_top

        # A sequence of length 0 gives zeros, not 0 / 0.
        out = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        place = (sequence * tl.num_programs(1) * group + heads) * num_splits + split
        out_rows = out_ptr + place[:, None] * head_dim + dims[None, :]
        tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=head_mask)
        if is_split:
            tl.store(log_sums_ptr + place, top + tl.log2(total), mask=rows < group)

    @triton.jit(do_not_specialize=["window", "num_splits", "min_split"])  # type: ignore[untyped-decorator]  # Triton has no types
    def _merge_splits_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        partial_ptr,
        log_sums_ptr,
        lengths_ptr,
        out_ptr,
        window,
        num_splits,
        min_split,
        head_dim: tl.constexpr,
        tile_splits: tl.constexpr,
        tile_columns: tl.constexpr,
        tile_dim: tl.constexpr,
    ):
        """Program (b, h) merges the splits of query head h of sequence b; the same online softmax, over splits."""
        sequence = tl.program_id(0).to(tl.int64)
        place = sequence * tl.num_programs(1) + tl.program_id(1)
        length = tl.load(lengths_ptr + sequence).to(tl.int32)
        first, share = _visible(length, window, num_splits, min_split, tile_columns)
        used = tl.cdiv(length - first, share)  # splits past these have written nothing

        dims = tl.arange(0, tile_dim)
        dim_mask = dims < head_dim
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        sums = tl.zeros([tile_dim], tl.float32)
        for start in range(0, used, tile_splits):
            splits = start + tl.arange(0, tile_splits)
            inside = splits < used
            rows = place * num_splits + splits
            log_sums = tl.load(log_sums_ptr + rows, mask=inside, other=float("-inf"))
            new_top = tl.maximum(top, tl.max(log_sums, axis=0))
            shrink = tl.exp2(top - new_top)
            weights = tl.exp2(log_sums - new_top)
            partial = partial_ptr + rows[:, None] * head_dim + dims[None, :]
            partial = tl.load(partial, mask=inside[:, None] & dim_mask[None, :], other=0.0)
            total = total * shrink + tl.sum(weights, axis=0)
            sums = sums * shrink + tl.sum(weights[:, None] * partial, axis=0)
            top = new_top
        out = sums / tl.where(total == 0.0, 1.0, total)
        tl.store(out_ptr + place * head_dim + dims, out.to(out_ptr.dtype.element_ty), mask=dim_mask)


def paged_attention_triton(
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None,
    max_length: int,
    total_length: int | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Compute attention of one query per sequence. Keys and values are read through the block table.

    The query of sequence `b` sees the columns below `lengths[b]`, its own being the last of them, and of these
    only the latest `window`. Column `c` is in block `block_table[b, c // block_size]` at offset `c % block_size`.
    Nothing here waits for the device: shapes and the number of splits follow from integers that the host has.

    Args:
        q: [B, Hq, D] float32, bfloat16 or float16. Last dimension contiguous or it is copied.
        k_store, v_store: [blocks, block_size, Hkv, D], dtype of `q`, the same strides, last dimension contiguous.
            Hq is a multiple of Hkv. Columns that no sequence sees are not read.
        block_table: [B, N] int32 or int64. Entries past a sequence's last block are not read.
        lengths: [B] int32 or int64; 0 gives a row of zeros.
        scale: factor on the scores.
        window: number of latest columns that a query sees, its own included, >= 1; None: all.
        max_length: the longest of `lengths`. Used only to choose the number of splits: a wrong value costs time,
            not correctness.
        total_length: the sum of `lengths`, for the same purpose; None: batch x `max_length`.
        num_splits: most programs that share a sequence's columns; None: chosen here.

    Returns:
        [B, Hq, D], contiguous, dtype of `q`.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit together, or a window below 1.
    """
    _check(q, k_store, v_store, block_table, lengths, window)
    batch, heads, head_dim = q.shape
    block_size, heads_kv = k_store.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out  # nothing to launch
    q = q if q.stride(2) == 1 else q.contiguous()
    block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    lengths = lengths.contiguous()
    if num_splits is None:
        total = batch * max_length if total_length is None else total_length
        visible = max_length if window is None else min(max_length, window)
        total = total if window is None else min(total, batch * window)
        num_splits = choose_num_splits(visible, total * heads_kv, _processors(q.device))
    group = heads // heads_kv
    tile_rows, tile_columns, tile_dim, num_warps = _tile(group, head_dim, q.dtype.itemsize)
    window = NO_WINDOW if window is None else min(window, NO_WINDOW)
    is_split = num_splits > 1
    partial, log_sums = out, None
    if is_split:
        partial = torch.empty(batch, heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
        log_sums = torch.empty(batch, heads, num_splits, dtype=torch.float32, device=q.device)
    with device_guard(q):
        _paged_attention_kernel[(batch, heads_kv, num_splits)](
            q,
            k_store,
            v_store,
            block_table,
            lengths,
            partial,
            log_sums,
            scale * 1.4426950408889634,  # log2(e)
            window,
            num_splits,
            MIN_SPLIT_COLUMNS,
            group,
            block_size,
            q.stride(0),
            q.stride(1),
            k_store.stride(0),
            k_store.stride(1),
            k_store.stride(2),
            block_table.stride(0),
            head_dim=head_dim,
            is_split=is_split,
            tile_rows=tile_rows,
            tile_columns=tile_columns,
            tile_dim=tile_dim,
            num_warps=num_warps,
            num_stages=3,
        )
        if is_split:
            _merge_splits_kernel[(batch, heads)](
                partial,
                log_sums,
                lengths,
                out,
                window,
                num_splits,
                MIN_SPLIT_COLUMNS,
                head_dim=head_dim,
                tile_splits=16,
                tile_columns=tile_columns,
                tile_dim=tile_dim,
                num_warps=4,
            )
    return out


def choose_num_splits(max_columns: int, total_work: int, processors: int) -> int:
    """Return the most programs that should share one sequence's columns.

    Every processor gets about `PROGRAMS_PER_PROCESSOR` programs if all programs have equally many columns. But no
    split has fewer than `MIN_SPLIT_COLUMNS`. One long sequence among many short ones is split, too, because the
    others are done long before it.

    Args:
        max_columns: columns that the longest sequence's query sees.
        total_work: columns that all queries see together, times KV heads.
        processors: streaming multiprocessors of the GPU.
    """
    even_share = -(-total_work // (PROGRAMS_PER_PROCESSOR * processors))
    return max(1, -(-max_columns // max(even_share, MIN_SPLIT_COLUMNS)))


@functools.cache
def _processors(device: torch.device) -> int:
    """Return the GPU's streaming multiprocessors; 1 on a CPU, where the interpreter runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _tile(group: int, head_dim: int, itemsize: int) -> tuple[int, int, int, int]:
    """Return (query heads, columns, dimensions, warps) of one program's tile.

    Tile sides are powers of two, and at least 16 for `tl.dot`. The rest is masked, which costs only arithmetic, and
    memory is the limit. A tile's keys take 16 KiB: even with the next tiles prefetched, several programs fit into
    one processor's shared memory.
    """
    rows = max(16, triton.next_power_of_2(group))
    dims = max(16, triton.next_power_of_2(head_dim))
    columns = min(128, max(16, 16384 // (dims * itemsize)))
    return rows, columns, dims, 8 if rows * dims >= 8192 else 4


def _check(
    q: Tensor, k_store: Tensor, v_store: Tensor, block_table: Tensor, lengths: Tensor, window: int | None
) -> None:
    batch, heads, head_dim = q.shape
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
    if block_table.dim() != 2 or block_table.shape[0] != batch or lengths.shape != (batch,):
        raise ValueError(
            f"block_table {list(block_table.shape)} must be [{batch}, N] and lengths {list(lengths.shape)} "
            f"[{batch}], one row for each of q's sequences"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, a query always sees its own column, but is {window}")
