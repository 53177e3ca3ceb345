"""Weights of any matrix as four or six bits in groups of 32: five or seven a weight, with their scales and mins.

```text
W[n, k]  ~  scale[n, g] * q[n, k] - min[n, g],    q in 0 … 15 or 0 … 63
```

If only the largest error counted, the smallest weight of a group would become 0, and the largest 15. What a
product notices is the sum of the squared errors. It is often smaller if the numbers 0 to 15 lie a little closer
together, so that weights at both ends are cut off. How much closer is best varies from group to group. So several
distances are tried. For each, the weights are rounded to integers, and the scale and the min with the least squared
error follow from these integers. The best of all tries is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.grouped import INPUTS, OUTPUTS, Form, Groups, Layout, pack_into

GROUP = INPUTS  # inputs of a group

FORM = Form(4, mins=True)
#: Values and down projections: rounding their weights changes the logits most, as llama.cpp's authors found.
FINER_FORM = Form(6, mins=True)
#: The head's weights decide each token, and a tied embedding is the head's.
HEAD_FORM = Form(8)

#: Distances that are tried, by bits: the range of a group's weights, divided by these numbers. A quarter of a
#: distance of four bits is among those of six: so weights that were quantized before may keep their values.
DIVISORS = {4: (15.0, 15.75, 16.5, 17.25, 18.0), 6: (60.0, 63.0, 64.5, 66.0)}
BLOCK_WEIGHTS = 2**18  # quantized at a time: 1 MB as float32


def quantize(weight: Tensor, layout: Layout) -> Tensor:
    """Quantize the matrices of a layer: [N, K], any type, one below the other -> panels, uint8."""
    panels = torch.empty(sum(layout.byte_counts), dtype=torch.uint8)
    step = max(1, BLOCK_WEIGHTS // (OUTPUTS * layout.inputs)) * OUTPUTS
    begin = row = 0
    for size, form in zip(layout.sizes, layout.forms, strict=True):
        for first in range(0, size, step):
            rows = weight[row + first : row + min(first + step, size)].float()
            end = begin + form.num_bytes(len(rows), layout.inputs)
            pack_into(panels[begin:end], in_groups(rows, form), form)
            begin = end
        row += size
    return panels


def in_groups(rows: Tensor, form: Form) -> Groups:
    """Quantize rows, [N, K] float32, to one of the forms above."""
    groups = rows.view(len(rows), -1, GROUP)
    if form == HEAD_FORM:
        scales = (groups.abs().amax(dim=-1) / 127).half()
        steps = groups / torch.where(scales == 0, 1.0, scales.float()).unsqueeze(-1)
        return Groups(steps.round_().clamp_(-127, 127).nan_to_num_().to(torch.int8).view(rows.shape), scales)
    largest = 2**form.bits - 1
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    best = torch.full_like(lowest, torch.inf)
    scales, mins = torch.full_like(lowest, torch.nan), -lowest  # NaN stays if a weight is not finite
    values = torch.zeros_like(groups)
    for divisor in DIVISORS[form.bits]:
        tried = (highest - lowest) / divisor
        start = lowest + tried * max(0.0, (divisor - largest) / 2)
        scale, low = _fitted(groups, _rounded(groups - start, tried, largest))
        own = _rounded(groups + low, scale, largest)
        error = (own * scale - low).sub_(groups).square_().sum(dim=-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scales, mins = torch.where(better, scale, scales), torch.where(better, low, mins)
        values = torch.where(better, own, values)
    return Groups(
        values.nan_to_num_().to(torch.uint8).view(rows.shape),
        scales.half().squeeze(-1),
        mins.half().squeeze(-1),
    )


def _rounded(distances: Tensor, scale: Tensor, largest: int) -> Tensor:
    """Divide by a scale and round to 0 … largest. All are 0 if the scale is 0."""
    return (distances / torch.where(scale == 0, torch.inf, scale)).round_().clamp_(0, largest)


def _fitted(weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the min with the least squared error, rounded to float16: [..., 32] each -> [..., 1]."""
    values_mean, weights_mean = values.mean(dim=-1, keepdim=True), weights.mean(dim=-1, keepdim=True)
    centred = values - values_mean
    variance = centred.square().sum(dim=-1, keepdim=True)
    scale = (centred * weights).sum(dim=-1, keepdim=True) / torch.where(variance == 0, 1.0, variance)
    scale = scale.half().float()
    return scale, (scale * values_mean - weights_mean).half().float()
