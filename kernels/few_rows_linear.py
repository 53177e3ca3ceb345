"""Linear layers on a GPU whose outputs are one sum each, so that a row has the same bits in any batch.

cuBLAS chooses a kernel by the number of rows. With few rows and a long sum there are too few outputs to keep all
processors busy. So it divides each sum among several (split-K). Then the parts are added, and one output in a
few hundred has another last bit than a sum in one piece:

```text
256 rows    ((w0 x0 + w1 x1) + w2 x2) + … + w8191 x8191                            one processor, in order
1 row       (w0 x0 + … + w4095 x4095)  +  (w4096 x4096 + … + w8191 x8191)          two processors
```

cuBLAS can be told not to divide sums (`whole_sums`). Its kernels then agree for 64 rows and more. But for
fewer rows cuBLAS has no fast kernel left: on an NVIDIA H200, a product that took 14 µs takes 186 µs. So few
rows get the kernel of this module. A tensor core adds products in the order of the inputs, whatever the shape
of the tiles. So a loop over tiles of inputs gives the bits of cuBLAS. That was measured on that GPU for the
sizes of several models. At start, a server tries its model's products on its own GPU
(`kernels.batch_invariance`).

A gated MLP's first product computes a tile of gates and the tile of their ups in one program, and writes
`activation(gate) * up`: one launch instead of two.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import HAS_TRITON, device_guard
from kernels.gated_act import gated_act
from kernels.int8 import product_in_float32
from kernels.overlap import early_launch

if HAS_TRITON:
    import triton
    import triton.language as tl

    from kernels.gated_act import gate_up_product
    from kernels.overlap import wait_for_inputs

#: The most rows that this module's kernel computes. cuBLAS computes more.
FEW_ROWS = 64

HALVES = (torch.bfloat16, torch.float16)


def whole_sums() -> None:
    """Make cuBLAS add each output of a 16-bit product in float32 and in one piece: no split-K, in this process."""
    torch.backends.cuda.preferred_blas_library("cublaslt")  # the other library has no such setting
    reduced_precision, split_k = False, False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced_precision, split_k
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = reduced_precision, split_k


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """Compute `y = x W^T (+ b)`: by the Triton kernel for few rows of 16 bits on a GPU, else by torch.

    Args:
        x: [T, K], the last dimension contiguous.
        weight: [N, K], contiguous, the type of x.
        bias: [N], the type of x.
        wide: whether the result keeps the float32 sums.

    Returns:
        [T, N]: float32 if `wide`; else the type of x, to which each float32 sum is rounded once.
    """
    if takes(x):
        return few_rows_linear_triton(x, weight, bias, wide)
    if not wide or x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    # torch's own product with a float32 result is for GPUs only
    y = torch.mm(x, weight.t(), out_dtype=torch.float32) if x.is_cuda else product_in_float32(x, weight)
    return y if bias is None else y + bias


def gated_linear(x: Tensor, weight: Tensor, activation: str, bias: Tensor | None = None) -> Tensor:
    """Compute `activation(x G^T) * (x U^T)`: in one launch if `takes(x)`, else in two.

    Args:
        x: [T, K], as for `linear`.
        weight: [2F, K], the rows of the F gates G, then those of the F ups U.
        activation: one of `kernels.gated_act.ACTIVATIONS`.
        bias: [2F], in the same order.

    Returns:
        [T, F]. Both products are rounded before the activation, and the result once more.
    """
    if takes(x):
        return few_rows_gated_linear_triton(x, weight, activation, bias)
    return gated_act(F.linear(x, weight, bias), activation)


def takes(x: Tensor) -> bool:
    """Return whether this module's kernel, not torch, computes products with x [T, K]."""
    return HAS_TRITON and x.is_cuda and x.dtype in HALVES and x.shape[0] <= FEW_ROWS


# --- Triton --------------------------------------------------------------------------------------------

if HAS_TRITON:

    @triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]  # Triton has no types
    def _few_rows_linear_kernel(  # type: ignore[no-untyped-def]  # Triton has no types
        x_ptr,
        weight_ptr,
        bias_ptr,
        out_ptr,
        num_rows,
        outputs,
        inputs,
        x_stride,
        activation: tl.constexpr,
        tile_rows: tl.constexpr,
        tile_outputs: tl.constexpr,
        tile_inputs: tl.constexpr,
        early: tl.constexpr,
    ):
        """Program i computes a tile of outputs for all rows. With an activation, it computes a tile of gates and
        the tile of their ups, which are `outputs` rows further down in the weight."""
        wait_for_inputs(early)
        rows = tl.arange(0, tile_rows)
        # 64-bit, because output * inputs passes 2^31 in the head of a large model.
        columns = tl.program_id(0).to(tl.int64) * tile_outputs + tl.arange(0, tile_outputs)
        is_row, is_output = rows < num_rows, columns < outputs
        steps = tl.arange(0, tile_inputs)[None, :]
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride + steps
        weight_rows = weight_ptr + columns[:, None] * inputs + steps
        up_rows = weight_rows + outputs.to(tl.int64) * inputs

        sums = tl.zeros([tile_rows, tile_outputs], tl.float32)
        up_sums = tl.zeros([tile_rows, tile_outputs], tl.float32)
        for start in range(0, inputs, tile_inputs):
            inside = start + steps < inputs
            x = tl.load(x_rows + start, mask=is_row[:, None] & inside, other=0.0)
            weight = tl.load(weight_rows + start, mask=is_output[:, None] & inside, other=0.0)
            sums = tl.dot(x, tl.trans(weight), sums)
            if activation is not None:
                up_weight = tl.load(up_rows + start, mask=is_output[:, None] & inside, other=0.0)
                up_sums = tl.dot(x, tl.trans(up_weight), up_sums)

        if bias_ptr is not None:
            sums += tl.load(bias_ptr + columns, mask=is_output, other=0.0).to(tl.float32)[None, :]
        out = sums.to(out_ptr.dtype.element_ty)
        if activation is not None:
            if bias_ptr is not None:
                up_bias = tl.load(bias_ptr + outputs + columns, mask=is_output, other=0.0)
                up_sums += up_bias.to(tl.float32)[None, :]
            up = up_sums.to(out_ptr.dtype.element_ty)
            # Rounded as if it had been written and read between two launches.
            out = gate_up_product(out.to(tl.float32), up.to(tl.float32), activation)
        place = out_ptr + rows.to(tl.int64)[:, None] * outputs + columns[None, :]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def few_rows_linear_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False
) -> Tensor:
    """Compute `linear` by the Triton kernel, with the same arguments and result. T is at most FEW_ROWS."""
    dtype = torch.float32 if wide else x.dtype
    return _launch(x, weight, bias, x.new_empty(x.shape[0], weight.shape[0], dtype=dtype), None)


def few_rows_gated_linear_triton(
    x: Tensor, weight: Tensor, activation: str, bias: Tensor | None = None
) -> Tensor:
    """Compute `gated_linear` by the Triton kernel, with the same arguments and result. T is at most FEW_ROWS."""
    return _launch(x, weight, bias, x.new_empty(x.shape[0], weight.shape[0] // 2), activation)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, activation: str | None) -> Tensor:
    """Compute a product into `out` [T, outputs], and return it."""
    (rows, inputs), outputs = x.shape, out.shape[1]
    if out.numel() == 0:
        return out  # no rows, nothing to launch
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = _tile(rows, outputs, _shared_bytes(x.device), gated=activation is not None)
    with device_guard(x):
        _few_rows_linear_kernel[(triton.cdiv(outputs, tile.outputs),)](
            x,
            weight,
            bias,
            out,
            rows,
            outputs,
            inputs,
            x.stride(0),
            activation=activation,
            tile_rows=tile.rows,
            tile_outputs=tile.outputs,
            tile_inputs=tile.inputs,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **early_launch(x.device),
            enable_fp_fusion=False,
        )
    return out


class _Tile(NamedTuple):
    """Rows, outputs and inputs of a tile; the warps of its program; and the tiles of inputs that the program holds
    at a time, including those that are being loaded."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


@functools.cache
def _tile(rows: int, outputs: int, shared_bytes: int, *, gated: bool) -> _Tile:
    """Return a program's tile: the fastest on an NVIDIA H200, for most models.

    On a GPU with less shared memory than an H200, a program holds fewer tiles of inputs at a time (`stages`).

    Args:
        rows: of x.
        outputs: columns of the result.
        shared_bytes: the shared memory that a program may use.
        gated: whether the program computes a tile of gates and a tile of ups.
    """
    tile = _fastest_tile(rows, outputs, gated=gated)
    stage_bytes = (tile.rows + tile.outputs * (2 if gated else 1)) * tile.inputs * 2
    return tile._replace(stages=max(1, min(tile.stages, shared_bytes // stage_bytes)))


def _fastest_tile(rows: int, outputs: int, *, gated: bool) -> _Tile:
    """Return the tile for a GPU with the shared memory of an H200; arguments as for `_tile`.

    With few outputs, only narrow tiles give each processor something to read. A program with a narrow tile
    has few sums, and each sum is added in one order, so there is little to share among warps. Two warps that
    load many inputs in one step of the loop are faster than four that load fewer.
    """
    if rows <= 16:
        if gated:
            return (
                _Tile(16, 16, 256, warps=4, stages=4)
                if outputs < 3072
                else _Tile(16, 32, 128, warps=4, stages=4)
            )
        if outputs <= 4096:
            return _Tile(16, 16, 512, warps=2, stages=4)
        if outputs < 65_536:
            return _Tile(16, 32, 256, warps=2, stages=4)
        return _Tile(16, 64, 128, warps=4, stages=4)
    if outputs < 3072:
        return _Tile(64, 16, 128, warps=4, stages=5)
    if outputs < 6144:
        return _Tile(64, 32, 128, warps=4, stages=5 if outputs <= 4096 else 4)
    return _Tile(64, 64, 64, warps=4, stages=5)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use. Triton's interpreter sets no limit."""
    if device.type != "cuda":
        return 2**31
    properties = torch.cuda.get_device_properties(device)
    most: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not in torch's stub
    return most
