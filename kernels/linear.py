"""Linear layers on weights packed for a CPU.

    y = x W^T (+ b)

A checkpoint keeps W as [outputs, inputs], row after row. A CPU's products want it in *panels*: 64 outputs side by
side, and for each pair of inputs the 64 outputs' weights together, in the order that dot-product instructions read:

```text
W [N, K]                    panel 0: outputs 0 to 63          panel 1: outputs 64 to 127, …
  w00 w01 w02 w03 …           w00 w01 | w10 w11 | … | w63,0 w63,1        inputs 0 and 1
  w10 w11 w12 w13 …           w02 w03 | w12 w13 | … | w63,2 w63,3        inputs 2 and 3
  …                           …
```

`torch.nn.functional.linear` converts W to such a form in every call, which for a few rows takes longer than the
product itself. With W packed once, a decode step reads each weight once, front to back.

**A row has the same bits in any batch.** Every output is one sum over its inputs, in an order that depends only on
the number of inputs. oneDNN's own products have that property for two or more rows, but not for one.

**Each new number of rows costs time once.** The library compiles a small product for each number of rows up
to 32, each number of inputs and each thread, at first use: 50 µs each on an AMD EPYC. Padding to fewer sizes
would cost more: a decode step's time grows with every row, in every step. Few rows need no such product: they
have loops of their own (`few_rows.h`), in bfloat16 where the processor has the instructions. On a processor
with matrix tiles (`amx.h`), few bfloat16 rows have such loops only for int8 weights.

**bfloat16 weights, float32 rows.** A float32 matrix whose numbers are all bfloat16 numbers, as those of most
checkpoints are, is kept in bfloat16. A core widens weights where it multiplies them. Widening is exact, so a
row has the bits that it would have with float32 panels.

**int8 weights.** A panel may hold int8 instead: half the bytes, for one factor an output (see
`kernels.int8`). A core widens weights to the type of x, in its registers or its cache. Widening is exact: an
int8 has at most eight significant bits, as many as a bfloat16. The products are added like any others, and
each float32 sum is multiplied by its output's factor. So a row of x still has the same bits in any batch.

A gated MLP's first product (see `kernels.gated_act`) has 32 gates and their 32 ups in one panel. So the kernel
computes both together, and writes `activation(gate) * up` instead of the product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import has_native_products

GATES_IN_PANEL = 32  # and as many ups; kernels/native/linear.cpp relies on it


def pack_linear(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return `weight` in panels, for `packed_linear`. None if K is odd or the native kernels cannot be used.

    Args:
        weight: [N, K] float32, bfloat16 or int8, contiguous.
        dtype: the type of x; default: the type of `weight`. The two may differ only if `weight` is int8.

    Returns:
        [ceil(N / 64), K / 2, 64, 2], or [ceil(N / 64), K, 64, 1] if x is float32. Missing outputs are zero. A
        float32 weight becomes bfloat16 if bfloat16 holds all its numbers exactly.
    """
    dtype = dtype or weight.dtype
    if not has_native_products(weight, dtype) or weight.shape[1] % 2:
        return None
    packed: Tensor = torch.ops.infer.pack_linear(weight, 1 if dtype == torch.float32 else 2)
    return packed


def packed_linear(
    x: Tensor,
    packed: Tensor,
    outputs: int,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    """Compute `y = x W^T (+ b)` with a packed W.

    Args:
        x: [T, K], of the type for which the weights were packed (`dtype` of `pack_linear`).
        packed: from `pack_linear`.
        outputs: N.
        bias: [N].
        scales: float32, N in all: the factors of int8 weights.
        wide: whether the result keeps the float32 sums.

    Returns:
        [T, N]: float32 if `wide`; else the type of x, to which each float32 sum is rounded once.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    out: Tensor = torch.ops.infer.linear(x, packed, outputs, bias, scales, wide)
    return out


def pack_gated_linear(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return `weight` in panels, for `packed_gated_linear`; None as for `pack_linear`.

    Args:
        weight: [2F, K] float32, bfloat16 or int8, contiguous: the rows of the F gates, then those of the F ups.
        dtype: as for `pack_linear`.

    Returns:
        [ceil(F / 32), K / 2, 64, 2], or [ceil(F / 32), K, 64, 1] if x is float32. Missing outputs are zero.
    """
    inputs = weight.shape[1]
    halves = weight.view(2, -1, inputs)
    halves = F.pad(halves, (0, 0, 0, -halves.shape[1] % GATES_IN_PANEL))
    by_panel = halves.view(2, -1, GATES_IN_PANEL, inputs).transpose(0, 1)
    return pack_linear(by_panel.reshape(-1, inputs), dtype)


def packed_gated_linear(
    x: Tensor,
    packed: Tensor,
    size: int,
    activation: str,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute `activation(x G^T) * (x U^T)` with packed gates G and ups U.

    Args:
        x: [T, K], as for `packed_linear`.
        packed: from `pack_gated_linear`.
        size: F.
        activation: one of `kernels.gated_act.ACTIVATIONS`.
        bias: [2F], the gates' first.
        scales: float32, 2F in all, the gates' first: the factors of int8 weights.

    Returns:
        [T, F]. Everything up to the result is float32; it is rounded once.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    out: Tensor = torch.ops.infer.gated_linear(x, packed, size, bias, scales, activation == "silu")
    return out
