"""Weights as int8, with one factor for each output: half the bytes of bfloat16.

```text
scale[n] = max |W[n, :]| / 127            W[n, k]  ~  scale[n] * q[n, k],    q in -127 … 127
y[n]     = scale[n] * sum of x[k] * q[n, k]
```

Only weights are quantized, symmetrically and per output channel. Activations, keys and values keep their
type. The weight that is farthest from 0 in a row becomes 127 or -127, and no weight moves by more than half a
step, `scale / 2`. A row of zeros stays a row of zeros.

The reference multiplies in float32, and rounds a sum once, or not at all. The native kernels (`kernels.linear`) do
the same on panels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127
BLOCK_WEIGHTS = 2**20  # weights that are held in float32 at a time: 4 MB


class Quantized(NamedTuple):
    """A matrix as int8.

    Attributes:
        values: [N, K] int8.
        scales: [N, 1] float32.
    """

    values: Tensor
    scales: Tensor


def quantize(weight: Tensor) -> Quantized:
    """Quantize a matrix: [N, K], any type.

    A row with a NaN or an infinity gets a scale of NaN or infinity. So its output is not finite, as without int8.
    """
    values = torch.empty_like(weight, dtype=torch.int8)
    scales = weight.new_empty(len(weight), 1, dtype=torch.float32)
    if weight.is_meta:  # there are shapes and no values
        return Quantized(values, scales)
    for own, value, scale in zip(
        *(_blocks(each, weight.shape[1]) for each in (weight, values, scales)), strict=True
    ):
        rows = own.float()
        scale.copy_(rows.abs().amax(dim=1, keepdim=True) / LARGEST)
        steps = rows / torch.where(scale == 0, 1.0, scale)  # a row of zeros stays one
        value.copy_(steps.round_().nan_to_num_().clamp_(-LARGEST, LARGEST))
    return Quantized(values, scales)


def dequantized_rows(rows: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a quantized matrix: row numbers [T] -> [T, K] of type `dtype`, rounded once."""
    return (F.embedding(rows, values) * scales[rows]).to(dtype)


def linear_int8_reference(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None, wide: bool = False
) -> Tensor:
    """Compute `y = x W^T (+ b)` with a quantized W: [T, K] -> [T, N], float32 if `wide`, else the type of x."""
    y = product_in_float32(x, values) * scales.view(-1)
    y = y if bias is None else y + bias.float()
    return y if wide else y.to(x.dtype)


def product_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `x W^T` in float32: [T, K] and [N, K] of any types -> [T, N] float32.

    Weights are widened block by block, so that the matrix is never in memory in float32.
    """
    rows = x.float()
    return torch.cat([F.linear(rows, block.float()) for block in _blocks(weight, weight.shape[1])], dim=-1)


def _blocks(tensor: Tensor, row_weights: int) -> list[Tensor]:
    """Split a tensor into views of consecutive rows, each of at most `BLOCK_WEIGHTS` weights, or of one row.

    `row_weights` is the number of weights of a row of the quantized matrix.
    """
    count = max(1, BLOCK_WEIGHTS // row_weights)
    return [tensor[first : first + count] for first in range(0, len(tensor), count)]
