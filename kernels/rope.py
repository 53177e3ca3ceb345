"""Rotary position embedding (Su et al., 2021, "RoFormer").

Every pair of coordinates of a query or key is turned by an angle proportional to the token's position, each
pair at its own speed. Turning both vectors by the same angle leaves their dot product as it was, so attention
scores depend on the *distance* of two tokens and not on their positions. Hugging Face checkpoints pair coordinate
`i` with `i + D/2` ("rotate half"):

    out[i]       = x[i]       * cos[i] - x[i + D/2] * sin[i]
    out[i + D/2] = x[i + D/2] * cos[i] + x[i]       * sin[i]          for i < D/2

Each token has its own position, so one call serves any mixture of sequences: a prompt that starts at 0 with others
that decode at 17 and at 4,000.
"""

import torch

from kernels.dispatch import HAS_TRITON, device_guard, use_native, use_triton

if HAS_TRITON:
    import triton
    import triton.language as tl


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
    """`rope` in torch; shapes as there.

    Written for few operations, because in a decode step each costs more to dispatch than to compute: q and k
    are turned as one tensor, and the halves of a head are two rows of a [T, heads, 2, D/2] view, so that one
    multiplication applies the cosine to both.
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


# --- C++ -----------------------------------------------------------------------------------------------


def rope_native(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope` by the kernel in `rope.cpp`; shapes as there, both results contiguous."""
    if positions is not None:
        cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_rotated, k_rotated = torch.ops.infer.rope(q, k, cos.contiguous(), sin.contiguous())
    return q_rotated, k_rotated


# --- Triton --------------------------------------------------------------------------------------------

if HAS_TRITON:

    @triton.jit
    def _rotate_heads(  # type: ignore[no-untyped-def]  # Triton has no types
        x_ptr, out_ptr, head_stride, heads, num_heads, columns, half, cos, sin
    ):
        """Rotate a tile of one token's heads; x_ptr and out_ptr point at that token."""
        heads = heads.to(tl.int64)  # heads may lie further apart than tokens: [heads, T, D] transposed
        mask = (heads < num_heads)[:, None] & (columns < half)[None, :]
        source = x_ptr + heads[:, None] * head_stride + columns[None, :]
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
        target = out_ptr + heads[:, None] * (2 * half) + columns[None, :]
        dtype = out_ptr.dtype.element_ty
        tl.store(target, (first * cos - second * sin).to(dtype), mask=mask)
        tl.store(target + half, (second * cos + first * sin).to(dtype), mask=mask)

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def _rope_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        q_ptr,
        k_ptr,
        cos_ptr,
        sin_ptr,
        positions_ptr,
        q_out_ptr,
        k_out_ptr,
        q_token_stride,
        q_head_stride,
        k_token_stride,
        k_head_stride,
        cos_stride,
        sin_stride,
        heads_q,
        heads_kv,
        half,
        has_positions: tl.constexpr,
        tile_heads: tl.constexpr,
        tile_half: tl.constexpr,
    ):
        """Program (t, i) rotates the heads in tile i of token t. The tiles of q come first, then those of k."""
        # 64-bit, because token * stride passes 2^31 in a long prefill.
        token = tl.program_id(0).to(tl.int64)
        row = tl.load(positions_ptr + token).to(tl.int64) if has_positions else token
        columns = tl.arange(0, tile_half)
        cos = tl.load(cos_ptr + row * cos_stride + columns, mask=columns < half, other=0.0)[None, :]
        sin = tl.load(sin_ptr + row * sin_stride + columns, mask=columns < half, other=0.0)[None, :]

        tile = tl.program_id(1)
        tiles_q = tl.cdiv(heads_q, tile_heads)
        if tile < tiles_q:
            heads = tile * tile_heads + tl.arange(0, tile_heads)
            q = q_ptr + token * q_token_stride
            q_out = q_out_ptr + token * heads_q * (2 * half)
            _rotate_heads(q, q_out, q_head_stride, heads, heads_q, columns, half, cos, sin)
        else:
            heads = (tile - tiles_q) * tile_heads + tl.arange(0, tile_heads)
            k = k_ptr + token * k_token_stride
            k_out = k_out_ptr + token * heads_kv * (2 * half)
            _rotate_heads(k, k_out, k_head_stride, heads, heads_kv, columns, half, cos, sin)


def rope_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope` by the Triton kernel, q and k in one launch; shapes as there, both results contiguous."""
    tokens, heads_q, head_dim = q.shape
    heads_kv = k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return q_out, k_out  # nothing to launch
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    if positions is not None:
        positions = positions.contiguous()
    half = head_dim // 2
    # Small tiles of heads: a decode step has few tokens, and its parallelism must come from the heads.
    tile_heads = min(4, triton.next_power_of_2(heads_q))
    tiles = triton.cdiv(heads_q, tile_heads) + triton.cdiv(heads_kv, tile_heads)
    with device_guard(q):
        _rope_kernel[(tokens, tiles)](
            q,
            k,
            cos,
            sin,
            positions,
            q_out,
            k_out,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos.stride(0),
            sin.stride(0),
            heads_q,
            heads_kv,
            half,
            has_positions=positions is not None,
            tile_heads=tile_heads,
            tile_half=triton.next_power_of_2(half),
            num_warps=2,
        )
    return q_out, k_out
