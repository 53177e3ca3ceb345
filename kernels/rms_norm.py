"""RMSNorm (Zhang & Sennrich, 2019), alone and fused with the residual addition before it.

    rms_norm(x) = x / sqrt(mean(x^2) + eps) * (weight + offset)

LayerNorm without the subtraction of the mean. Llama and Qwen multiply by `weight`; Gemma stores the distance
from one and multiplies by `1 + weight`: that is `offset=1.0`.

A norm does a handful of operations per element, so on a GPU its time is the time to move the rows through
memory. As separate operations (square, mean, multiply, multiply, cast), a norm moves the rows several times.
The kernel reads a row once, keeps it in registers and writes it once. `fused_add_rms_norm` saves one more round
trip: the residual sum is written for the next layer and normalised while it is still in registers.
"""

import functools

import torch
import torch.nn.functional as F

from kernels.dispatch import HAS_TRITON, device_guard, use_native, use_triton
from kernels.overlap import early_launch

if HAS_TRITON:
    import triton
    import triton.language as tl

    from kernels.overlap import wait_for_inputs


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Normalise every row of `x` to a root mean square of one, then scale its columns.

    Computed in float32 and rounded once, to the dtype of `x`: a sum of thousands of squares needs more than
    the eight bits of precision that bfloat16 has.

    Args:
        x: [..., H] float32, bfloat16 or float16. The last dimension is contiguous, the others may have any
            strides: the heads of a query inside a fused QKV matrix are read without a copy.
        weight: [H], any floating dtype.
        eps: added to the mean square, so that a row of zeros stays zero instead of 0 / 0.
        offset: added to `weight`; 1.0 for Gemma.

    Returns:
        [..., H], contiguous, dtype of `x`.

    Raises:
        ValueError: `weight` is not [H].
    """
    _check_weight(x, weight)
    if use_triton(x):
        return rms_norm_triton(x, weight, eps, offset)
    if use_native(x):
        return rms_norm_native(x, weight, eps, offset)
    return rms_norm_reference(x, weight, eps, offset)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` to the residual stream and normalise the sum: the step between two parts of a model.

    The residual stream stays in float32. Rounded to the dtype of `x` at each addition, it would lose what small
    parts add to it. Neither input is written to.

    Args:
        x: [T, H], output of the part before: attention or a feed-forward network.
        residual: [T, H] float32, the residual stream.
        weight: [H], any floating dtype.
        eps: added to the mean square.
        offset: added to `weight`; 1.0 for Gemma.

    Returns:
        (normed [T, H], dtype of `x`; new_residual [T, H], float32), both contiguous.

    Raises:
        ValueError: `weight` is not [H], or `x` and `residual` differ in shape.
    """
    _check_weight(x, weight)
    if x.shape != residual.shape:
        raise ValueError(
            f"x and residual must have one shape, but are {list(x.shape)} and {list(residual.shape)}"
        )
    if use_triton(x):
        return fused_add_rms_norm_triton(x, residual, weight, eps, offset)
    if use_native(x):
        return fused_add_rms_norm_native(x, residual, weight, eps, offset)
    return fused_add_rms_norm_reference(x, residual, weight, eps, offset)


def _check_weight(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}], the last size of x, but is {list(weight.shape)}")


# --- torch ---------------------------------------------------------------------------------------------


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Compute `rms_norm` in torch, with the same arguments and result.

    `F.rms_norm` computes in float32 and rounds once, and needs input and weight of one dtype. It is one call:
    in a decode step on a CPU, dispatching five small operations would take longer than computing them.
    """
    row = x.shape[-1:]
    if offset == 0.0 and weight.dtype == x.dtype:
        return F.rms_norm(x, row, weight, eps).contiguous()
    scale = weight.float() if offset == 0.0 else weight.float() + offset
    return F.rms_norm(x.float(), row, scale, eps).to(x.dtype).contiguous()


def fused_add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `fused_add_rms_norm` in torch, with the same arguments and results."""
    new_residual = (x + residual).contiguous()
    return rms_norm_reference(new_residual, weight, eps, offset).to(x.dtype), new_residual


# --- C++ -----------------------------------------------------------------------------------------------


def rms_norm_native(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Compute `rms_norm` by the kernel in `rms_norm.cpp`, with the same arguments and result."""
    rows = _grouped_rows(x)
    out: torch.Tensor = torch.ops.infer.rms_norm(rows, weight.contiguous(), eps, offset)
    return out.view(-1, *x.shape[1:])  # -1: a recorded pass fits any number of rows


def fused_add_rms_norm_native(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `fused_add_rms_norm` by the kernel in `rms_norm.cpp`, with the same arguments and results."""
    normed, total = torch.ops.infer.fused_add_rms_norm(
        _dense_rows(x), _dense_rows(residual), weight.contiguous(), eps, offset
    )
    return normed, total


def _grouped_rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape [..., H] to [groups, rows, H], the last dimension contiguous.

    Returns a view where possible, for example of the heads [T, heads, D] in a fused QKV matrix. Otherwise returns a
    copy. A matrix [T, H] becomes [T, 1, H].
    """
    return _dense_rows(x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1]))


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with its last dimension contiguous, as a copy if needed."""
    return x if x.stride(-1) == 1 else x.contiguous()


# --- Triton --------------------------------------------------------------------------------------------

if HAS_TRITON:

    @triton.jit
    def _normalise(x, weight, eps, offset, hidden_size):  # type: ignore[no-untyped-def]  # Triton has no types
        """x [rows, columns] and weight [columns] in float32, zero beyond hidden_size -> [rows, columns]."""
        # The masked columns hold zeros: they add nothing to the sum, but must not count in the mean either.
        mean_square = tl.sum(x * x, axis=1) / hidden_size
        return x * tl.rsqrt(mean_square + eps)[:, None] * (weight + offset)[None, :]

    # `num_rows` changes from pass to pass. Specialised on it, a kernel is compiled again for 1 and multiples of 16.
    @triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]  # Triton has no types
    def _rms_norm_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        x_ptr,
        weight_ptr,
        out_ptr,
        num_rows,
        rows_per_group,
        group_stride,
        row_stride,
        hidden_size,
        eps,
        offset,
        tile_rows: tl.constexpr,
        tile_columns: tl.constexpr,
        early: tl.constexpr,
    ):
        """One program normalises `tile_rows` rows. Row r of x is row r % rows_per_group of its group."""
        wait_for_inputs(early)
        # 64-bit, because row * stride passes 2^31 in a long prefill (a million rows of 2,048 columns do).
        rows = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
        columns = tl.arange(0, tile_columns)
        column_mask = columns < hidden_size
        mask = (rows < num_rows)[:, None] & column_mask[None, :]

        row_starts = (rows // rows_per_group) * group_stride + (rows % rows_per_group) * row_stride
        x = tl.load(x_ptr + row_starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)

        normed = _normalise(x, weight, eps, offset, hidden_size)
        out = out_ptr + rows[:, None] * hidden_size + columns[None, :]
        tl.store(out, normed.to(out_ptr.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]  # Triton has no types
    def _fused_add_rms_norm_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        x_ptr,
        residual_ptr,
        weight_ptr,
        normed_ptr,
        new_residual_ptr,
        num_rows,
        x_stride,
        residual_stride,
        hidden_size,
        eps,
        offset,
        tile_rows: tl.constexpr,
        tile_columns: tl.constexpr,
        early: tl.constexpr,
    ):
        """One program adds and normalises `tile_rows` whole rows."""
        wait_for_inputs(early)
        rows = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
        columns = tl.arange(0, tile_columns)
        column_mask = columns < hidden_size
        mask = (rows < num_rows)[:, None] & column_mask[None, :]

        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
        residual = tl.load(
            residual_ptr + rows[:, None] * residual_stride + columns[None, :], mask=mask, other=0.0
        )
        weight = tl.load(weight_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)

        out = rows[:, None] * hidden_size + columns[None, :]
        total = x.to(tl.float32) + residual
        tl.store(new_residual_ptr + out, total, mask=mask)
        normed = _normalise(total, weight, eps, offset, hidden_size)
        tl.store(normed_ptr + out, normed.to(normed_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Compute `rms_norm` by the Triton kernel, with the same arguments and result."""
    hidden_size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out  # no rows, nothing to launch
    rows = _grouped_rows(x)
    num_rows = rows.shape[0] * rows.shape[1]
    tile_rows, tile_columns, num_warps = _tile(hidden_size)
    with device_guard(x):
        _rms_norm_kernel[(triton.cdiv(num_rows, tile_rows),)](
            rows,
            weight.contiguous(),
            out,
            num_rows,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            hidden_size,
            eps,
            offset,
            tile_rows=tile_rows,
            tile_columns=tile_columns,
            num_warps=num_warps,
            **early_launch(x.device),
        )
    return out


def fused_add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `fused_add_rms_norm` by the Triton kernel, with the same arguments and results."""
    num_rows, hidden_size = x.shape
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if normed.numel() == 0:
        return normed, new_residual
    x, residual = _dense_rows(x), _dense_rows(residual)
    tile_rows, tile_columns, num_warps = _tile(hidden_size)
    with device_guard(x):
        _fused_add_rms_norm_kernel[(triton.cdiv(num_rows, tile_rows),)](
            x,
            residual,
            weight.contiguous(),
            normed,
            new_residual,
            num_rows,
            x.stride(0),
            residual.stride(0),
            hidden_size,
            eps,
            offset,
            tile_rows=tile_rows,
            tile_columns=tile_columns,
            num_warps=num_warps,
            **early_launch(x.device),
        )
    return normed, new_residual


@functools.cache
def _tile(hidden_size: int) -> tuple[int, int, int]:
    """Return the rows, columns and warps of one program: one wide row, or several narrow rows (heads of q)."""
    columns = triton.next_power_of_2(hidden_size)
    rows = max(1, 1024 // columns)
    return rows, columns, min(8, max(1, rows * columns // 512))
