"""Attention over a KV store of blocks: several implementations, and the choice among them.

| function | where | how |
| --- | --- | --- |
| `paged_attention_triton` | CUDA with Triton | reads keys in place |
| `native_attention` | CPU, float32 and bfloat16 | takes a tile of keys at a time, in C++ |
| `gathered_attention` | everywhere | copies the keys it needs, then two products and a softmax |

On a CPU, the last two pad, since bfloat16 products are compiled for every new size. `gathered_attention`
fills a prompt's queries and all gathered columns up to whole tiles of 64: a chunk of 65 queries is computed
as 128. The C++ kernel fills the rows of its last tile up to a multiple of 16, and the columns to a multiple
of 64. If the processor has the instructions and the head size is a multiple of 32, the C++ kernel computes up
to 16 rows without padding rows, except in bfloat16 with the matrix tiles of Intel AMX, which always have 16
rows. Padding columns are hidden from every query, and results of padding queries are dropped.

`kernels.attention_layout` computes which columns a query sees, and their addresses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_layout import AttentionLayout, DecodeGroup
from kernels.dispatch import has_native_products, use_triton
from kernels.paged_attention import paged_attention_triton, queries_per_tile


def gathered_attention(
    q: Tensor, k_store: Tensor, v_store: Tensor, layout: AttentionLayout, *, scale: float, window: int | None
) -> Tensor:
    """Compute attention by gathering keys and values through the block table, then two products and a softmax.

    Runs on any device, and is tuned for a CPU. It is used where neither the C++ nor the Triton kernel can
    run. For a simple definition of attention, read `kernels.paged_attention.paged_attention_reference`.

    Args:
        q: [T, Hq, D], sequence after sequence.
        k_store, v_store: [blocks, block_size, Hkv, D], with the pass's own keys and values already written.
        layout: which columns each query sees, and their addresses.
        scale: factor on the scores.
        window: number of latest columns that a query sees, its own included; None: all.

    Returns:
        [T, Hq, D].
    """
    heads_kv, head_dim = k_store.shape[-2:]
    assert heads_kv == layout.heads_kv
    k_flat, v_flat = k_store.view(-1, head_dim), v_store.view(-1, head_dim)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    singles = layout.num_single
    for group in layout.decode_groups(window) if singles else ():
        gathered = layout.workspace.gather(group.addresses, k_flat, v_flat)
        out[group.queries] = _decode(q[group.queries], gathered, group, heads_kv, scale)
    for segment in layout.prefill_segments(window) if singles < q.shape[0] else ():
        gathered = layout.workspace.gather(segment.addresses, k_flat, v_flat)
        k, v = gathered.view(2, heads_kv, -1, head_dim)
        for tile in segment.tiles:
            seen = tile.columns
            out[tile.queries] = _prefill(q[tile.queries], k[:, seen], v[:, seen], tile.hidden, scale)
    return out


def _decode(q: Tensor, gathered: Tensor, group: DecodeGroup, heads_kv: int, scale: float) -> Tensor:
    """Compute one query of each sequence, all sequences in one call: [B, Hq, D] -> [B, Hq, D].

    Keys and values: [2, Hkv * B * width, D]. The query heads that share a KV head become the rows of one small
    matrix, so keys are read once per KV head.
    """
    batch, heads, head_dim = q.shape
    k, v = gathered.view(2, heads_kv * batch, group.width, head_dim)
    folded = q.view(batch, heads_kv, heads // heads_kv, head_dim).transpose(0, 1)
    return _weigh(folded, k, v, group.hidden, scale).transpose(0, 1).reshape(batch, heads, head_dim)


def _prefill(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Compute a tile of queries of one sequence, padded to the rows of `hidden`: [Tq, Hq, D] -> [Tq, Hq, D].

    Keys and values: [Hkv, columns, D]. All queries of all heads that share a KV head become the rows of one matrix.
    """
    length, heads, head_dim = q.shape
    heads_kv, whole = k.shape[0], hidden.shape[0]
    filled = F.pad(q, (0, 0, 0, 0, 0, whole - length))
    folded = filled.view(whole, heads_kv, heads // heads_kv, head_dim).permute(1, 2, 0, 3)
    out = _weigh(folded, k, v, hidden, scale).permute(2, 0, 1, 3)
    return out[:length].reshape(length, heads, head_dim)


def _weigh(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Compute softmax(q kᵀ · scale) v by two matrix products and a softmax.

    Plain products use a CPU's bfloat16 instructions even if it has no AMX. The fused kernel of
    `scaled_dot_product_attention` does not: on an AMD EPYC (avx512_bf16, no AMX; torch 2.13) it was no faster in
    bfloat16 than in float32. Scores are rounded to the type of `q`.

    Args:
        q: [X, Y, Z, D]: its rows, in order, are N equal groups. Group n is multiplied by key matrix n.
        k, v: [N, S, D].
        hidden: True where a score is hidden; broadcast to the last columns of [X, Y, Z, S].

    Returns:
        [X, Y, Z, D].
    """
    matrices, columns, head_dim = k.shape
    rows = q.reshape(matrices, -1, head_dim)
    scores = torch.baddbmm(q.new_empty(()), rows, k.transpose(1, 2), beta=0, alpha=scale)  # beta: add nothing
    scores.view(*q.shape[:3], columns)[..., -hidden.shape[-1] :].masked_fill_(hidden, -torch.inf)
    return torch.bmm(scores.softmax(-1), v).view(q.shape)


def native_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Compute `attention` by the kernel in `attention.cpp` (CPU, float32 and bfloat16): same arguments and result.

    If PyTorch's products keep a row's bits (`kernels.batch_invariance`), a token's result has the same bits
    whether it is decoded or prefilled, in any chunk and any batch.
    """
    indices = layout.host
    out: Tensor = torch.ops.infer.attention(
        q,
        k,
        v,
        k_store,
        v_store,
        layout.block_tables,
        layout.rows,
        indices.query_offsets,
        indices.kv_lengths,
        scale,
        window or 0,
    )
    return out


def written_attention(
    q: Tensor, k_store: Tensor, v_store: Tensor, layout: AttentionLayout, *, scale: float, window: int | None
) -> Tensor:
    """Compute `attention` by the Triton kernel. The pass's keys and values are in the stores already."""
    indices = layout.paged(queries_per_tile(q.shape[1] // k_store.shape[2], q.dtype))
    return paged_attention_triton(q, k_store, v_store, indices, scale=scale, window=window)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Write a pass's keys and values to the block store, then compute attention by the position rule.

    Chooses the implementation. On a CPU it is the C++ kernel, if it is available. On CUDA with Triton it is the
    paged kernel. Everywhere else keys and values are gathered.

    Args:
        q: [T, Hq, D], sequence after sequence; T is the number of queries in `layout`.
        k, v: [T, Hkv, D], of the same tokens. A token's heads are contiguous in q, k and v.
        k_store, v_store: [blocks, block_size, Hkv, D]; written at the tokens' own columns only.
        layout: addresses of these columns and of earlier ones.
        scale: factor on the scores.
        window: number of latest columns that a query sees, its own included; None: all.

    Returns:
        [T, Hq, D].
    """
    if has_native_products(q):
        return native_attention(q, k, v, k_store, v_store, layout, scale=scale, window=window)
    for store, new in ((k_store, k), (v_store, v)):
        store.view(-1, *store.shape[2:]).index_copy_(0, layout.write_addresses, new)
    if use_triton(q):
        return written_attention(q, k_store, v_store, layout, scale=scale, window=window)
    return gathered_attention(q, k_store, v_store, layout, scale=scale, window=window)
