"""Rotary position embedding (Su et al., 2021, "RoFormer").

Every pair of coordinates of a query or key is turned by an angle proportional to the token's position, each
pair at its own speed. Turning both vectors by the same angle leaves their dot product as it was, so attention
scores depend on the *distance* of two tokens and not on their positions. Hugging Face checkpoints pair coordinate
`i` with `i + D/2` ("rotate half"):

    out[i]       = x[i]       * cos[i] - x[i + D/2] * sin[i]
    out[i + D/2] = x[i + D/2] * cos[i] + x[i]       * sin[i]          for i < D/2

Each token has its own position, so one call serves any mixture of sequences: a prompt that starts at 0 with others
that decode at 17 and at 4,000.

On a GPU, one launch does all that is done to a layer's queries, keys and values between their projection and
attention (`norm_rope_write_triton`): the norms of queries and keys, if the model has any, the rotation, and the
writes to the KV store.
"""

from typing import NamedTuple

import torch

from kernels.dispatch import HAS_TRITON, device_guard, use_native, use_triton
from kernels.overlap import early_launch
from kernels.rms_norm import rms_norm_reference

if HAS_TRITON:
    import triton
    import triton.language as tl

    from kernels.overlap import wait_for_inputs


class HeadNorms(NamedTuple):
    """Norms of queries and keys: weights [D], and `eps` and `offset` as in `kernels.rms_norm.rms_norm`."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    offset: float


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys to their tokens' positions.

    The angles come in one of two forms. A *shared table* holds a row per position, and `positions` names each
    token's row. *Per-row* angles hold a row per token and need no `positions`: a model that gathers them once
    saves doing so in every layer.

    Computed in float32 and rounded once, to the dtype of `q`.

    Args:
        q: [T, Hq, D], D even. Last dimension contiguous, the others with any strides (a view of a fused QKV
            matrix).
        k: [T, Hkv, D], dtype of `q`, strides as for `q`.
        cos: [P, D/2] float32 with `positions`, [T, D/2] float32 without.
        sin: shape and dtype of `cos`.
        positions: [T] int64, each in [0, P), or None. Not checked on a GPU: that would make the host wait.

    Returns:
        (q rotated [T, Hq, D], k rotated [T, Hkv, D]), dtype of `q`, last dimension contiguous. The two may be
        views of one tensor.

    Raises:
        ValueError: shapes that do not fit together.
    """
    _check_shapes(q, k, cos, sin, positions)
    if use_triton(q):
        return rope_triton(q, k, cos, sin, positions)
    if use_native(q):
        return rope_native(q, k, cos, sin, positions)
    return rope_reference(q, k, cos, sin, positions)


def _check_shapes(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None
) -> None:
    tokens, _, head_dim = q.shape
    if k.shape[0] != tokens or k.shape[2] != head_dim:
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} must agree in tokens and head size")
    if cos.shape != sin.shape or 2 * cos.shape[1] != head_dim:
        raise ValueError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} must both have half of q's head size {head_dim}"
        )
    rows = cos if positions is None else positions
    if rows.shape[0] != tokens:
        name = "cos" if positions is None else "positions"
        raise ValueError(f"{name} must have one row for each of q's {tokens} tokens, but has {rows.shape[0]}")


# --- torch ---------------------------------------------------------------------------------------------


def rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `rope` in torch, with the same arguments and results.

    Written with few operations, because in a decode step an operation takes longer to dispatch than to
    compute: q and k are turned as one tensor, and the halves of a head are two rows of a [T, heads, 2, D/2]
    view, so that one multiplication applies the cosine to both.
    """
    if positions is not None:
        cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
    heads_q, heads_kv = q.shape[1], k.shape[1]
    x = torch.cat((q, k), dim=1)
    halves = x.float().view(x.shape[0], x.shape[1], 2, x.shape[2] // 2)
    rotated = halves * cos[:, None, None]
    first, second = halves.unbind(2)
    rotated_first, rotated_second = rotated.unbind(2)
    rotated_first.addcmul_(second, sin[:, None], value=-1)
    rotated_second.addcmul_(first, sin[:, None])
    q_rotated, k_rotated = rotated.view(x.shape).to(x.dtype).split_with_sizes((heads_q, heads_kv), dim=1)
    return q_rotated, k_rotated


def norm_rope_write_reference(
    heads: torch.Tensor,
    norms: HeadNorms | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_store: torch.Tensor,
    v_store: torch.Tensor,
    addresses: torch.Tensor,
) -> torch.Tensor:
    """Compute `norm_rope_write_triton` in torch, with the same arguments and result."""
    heads_kv = k_store.shape[2]
    q, k, v = heads.split_with_sizes([heads.shape[1] - 2 * heads_kv, heads_kv, heads_kv], dim=1)
    if norms is not None:
        q = rms_norm_reference(q, norms.q_weight, norms.eps, norms.offset)
        k = rms_norm_reference(k, norms.k_weight, norms.eps, norms.offset)
    q, k = rope_reference(q, k, cos, sin)
    for store, new in ((k_store, k), (v_store, v)):
        store.view(-1, *store.shape[2:]).index_copy_(0, addresses, new)
    return q


# --- C++ -----------------------------------------------------------------------------------------------


def rope_native(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `rope` by the kernel in `rope.cpp`, with the same arguments and results, both contiguous."""
    if positions is not None:
        cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_rotated, k_rotated = torch.ops.infer.rope(q, k, cos.contiguous(), sin.contiguous())
    return q_rotated, k_rotated


# --- Triton --------------------------------------------------------------------------------------------

if HAS_TRITON:

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _rotate_heads(  # type: ignore[no-untyped-def]  # Triton has no types
        x_ptr,
        out_ptr,
        head_stride,
        out_stride,
        heads,
        num_heads,
        columns,
        half,
        cos,
        sin,
        weight_ptr,
        eps,
        offset,
        has_norms: tl.constexpr,
    ):
        """Norm and rotate a tile of one token's heads; x_ptr and out_ptr point at that token."""
        heads = heads.to(tl.int64)  # heads may lie further apart than tokens: [heads, T, D] transposed
        mask = (heads < num_heads)[:, None] & (columns < half)[None, :]
        source = x_ptr + heads[:, None] * head_stride + columns[None, :]
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
        target = out_ptr + heads[:, None] * out_stride + columns[None, :]
        dtype = out_ptr.dtype.element_ty
        if has_norms:  # rounded before the rotation, as a norm of its own is
            scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * half) + eps)[:, None]
            weight = tl.load(weight_ptr + columns, mask=columns < half, other=0.0).to(tl.float32)
            first = (first * scale * (weight + offset)[None, :]).to(dtype).to(tl.float32)
            weight = tl.load(weight_ptr + half + columns, mask=columns < half, other=0.0).to(tl.float32)
            second = (second * scale * (weight + offset)[None, :]).to(dtype).to(tl.float32)
        tl.store(target, (first * cos - second * sin).to(dtype), mask=mask)
        tl.store(target + half, (second * cos + first * sin).to(dtype), mask=mask)

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _rope_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        q_ptr,
        k_ptr,
        v_ptr,
        q_weight_ptr,
        k_weight_ptr,
        cos_ptr,
        sin_ptr,
        positions_ptr,
        addresses_ptr,
        q_out_ptr,
        k_out_ptr,
        v_out_ptr,
        eps,
        offset,
        q_token_stride,
        q_head_stride,
        k_token_stride,
        k_head_stride,
        out_token_stride,
        out_head_stride,
        cos_stride,
        sin_stride,
        heads_q,
        heads_kv,
        half,
        has_norms: tl.constexpr,
        writes: tl.constexpr,
        has_positions: tl.constexpr,
        tile_heads: tl.constexpr,
        tile_half: tl.constexpr,
        early: tl.constexpr,
    ):
        """Program (t, i) rotates the heads in tile i of token t. The tiles of q come first, then those of k, then
        those of v, which are only copied to the store. v has the strides of k."""
        wait_for_inputs(early)
        # 64-bit, because token * stride passes 2^31 in a long prefill.
        token = tl.program_id(0).to(tl.int64)
        row = tl.load(positions_ptr + token).to(tl.int64) if has_positions else token
        columns = tl.arange(0, tile_half)
        cos = tl.load(cos_ptr + row * cos_stride + columns, mask=columns < half, other=0.0)[None, :]
        sin = tl.load(sin_ptr + row * sin_stride + columns, mask=columns < half, other=0.0)[None, :]

        tile = tl.program_id(1)
        tiles_q = tl.cdiv(heads_q, tile_heads)
        tiles_kv = tl.cdiv(heads_kv, tile_heads)
        target = tl.load(addresses_ptr + token).to(tl.int64) if writes else token
        if tile < tiles_q:
            heads = tile * tile_heads + tl.arange(0, tile_heads)
            q = q_ptr + token * q_token_stride
            q_out = q_out_ptr + token * heads_q * (2 * half)
            _rotate_heads(
                q,
                q_out,
                q_head_stride,
                2 * half,
                heads,
                heads_q,
                columns,
                half,
                cos,
                sin,
                q_weight_ptr,
                eps,
                offset,
                has_norms,
            )
        elif tile < tiles_q + tiles_kv:
            heads = (tile - tiles_q) * tile_heads + tl.arange(0, tile_heads)
            k = k_ptr + token * k_token_stride
            k_out = k_out_ptr + target * out_token_stride
            _rotate_heads(
                k,
                k_out,
                k_head_stride,
                out_head_stride,
                heads,
                heads_kv,
                columns,
                half,
                cos,
                sin,
                k_weight_ptr,
                eps,
                offset,
                has_norms,
            )
        elif writes:
            heads = (tile - tiles_q - tiles_kv) * tile_heads + tl.arange(0, tile_heads)
            mask = (heads < heads_kv)[:, None] & (columns < half)[None, :]
            rows = heads.to(tl.int64)[:, None]
            v = v_ptr + token * k_token_stride + rows * k_head_stride + columns[None, :]
            v_out = v_out_ptr + target * out_token_stride + rows * out_head_stride + columns[None, :]
            tl.store(v_out, tl.load(v, mask=mask), mask=mask)
            tl.store(v_out + half, tl.load(v + half, mask=mask), mask=mask)


def rope_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `rope` by the Triton kernel, with the same arguments and results, both contiguous.

    One launch computes q and k.
    """
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=q.dtype, device=q.device)
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    _launch(q, k, None, None, cos, sin, positions, None, q_out, k_out, None)
    return q_out, k_out


def norm_rope_write_triton(
    heads: torch.Tensor,
    norms: HeadNorms | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_store: torch.Tensor,
    v_store: torch.Tensor,
    addresses: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate queries and keys, and write keys and values to their stores, in one launch.

    Args:
        heads: [T, Hq + 2 Hkv, D], the projected queries, keys and values of each token. Last dimension contiguous.
        norms: of queries and keys; None: the model has none.
        cos, sin: [T, D/2] float32, contiguous rows.
        k_store, v_store: [blocks, block_size, Hkv, D], dtype of `heads`, contiguous.
        addresses: [T] int64, rows of the stores seen as [blocks * block_size, Hkv, D].

    Returns:
        The rotated queries [T, Hq, D], contiguous.
    """
    heads_kv = k_store.shape[2]
    q, k, v = heads.split_with_sizes([heads.shape[1] - 2 * heads_kv, heads_kv, heads_kv], dim=1)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_rows, v_rows = (store.view(-1, *store.shape[2:]) for store in (k_store, v_store))
    _launch(q, k, v, norms, cos, sin, None, addresses, q_out, k_rows, v_rows)
    return q_out


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    norms: HeadNorms | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    addresses: torch.Tensor | None,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor | None,
) -> None:
    """Launch the kernel. With `v`, `addresses` and `v_out`, keys and values are written to their stores."""
    tokens, heads_q, head_dim = q.shape
    if tokens == 0:
        return  # nothing to launch
    heads_kv, half = k.shape[1], head_dim // 2
    # Small tiles of heads: a decode step has few tokens, and its parallelism must come from the heads.
    tile_heads = min(4, triton.next_power_of_2(heads_q))
    tiles = triton.cdiv(heads_q, tile_heads) + triton.cdiv(heads_kv, tile_heads) * (1 if v is None else 2)
    with device_guard(q):
        _rope_kernel[(tokens, tiles)](
            q,
            k,
            v,
            None if norms is None else norms.q_weight,
            None if norms is None else norms.k_weight,
            cos,
            sin,
            None if positions is None else positions.contiguous(),
            None if addresses is None else addresses.contiguous(),
            q_out,
            k_out,
            v_out,
            0.0 if norms is None else norms.eps,
            0.0 if norms is None else norms.offset,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            k_out.stride(0),
            k_out.stride(1),
            cos.stride(0),
            sin.stride(0),
            heads_q,
            heads_kv,
            half,
            has_norms=norms is not None,
            writes=v is not None,
            has_positions=positions is not None,
            tile_heads=tile_heads,
            tile_half=triton.next_power_of_2(half),
            num_warps=2,
            **early_launch(q.device),
        )
