"""Exercise: quantize a row of weights, and predict the error of its product.

Write `quantized`, then run `.venv/bin/pytest docs/exercises/rounded_weights.py`.
The check compares your integers with the server's, and your prediction with the errors of 2,000 outputs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
import torch

from kernels.int8 import quantize


def quantized(row: Sequence[float], x: Sequence[float]) -> tuple[list[int], float, float]:
    """Quantize one output's weights to int8, and predict the error of their product with `x`.

    A step is the distance between two neighbouring int8 values. Rounding changes a weight by at most half a step.
    If all errors up to that are equally likely, the mean square of one weight's error is step ** 2 / 12, and the
    errors of different weights are uncorrelated.

    Args:
        row: K weights, not all zero.
        x: K inputs.

    Returns:
        The integers, from -127 to 127; the scale, by which a weight is about scale * integer, and the weight of the
        largest magnitude becomes 127 or -127; and the predicted root mean square error of sum(x[k] * weight[k]).
    """
    raise NotImplementedError("the scale first")


# ---------------------------------------------------------------------- the check

OUTPUTS, INPUTS = 2000, 96
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(OUTPUTS, INPUTS, generator=GENERATOR)
X = torch.randn(INPUTS, generator=GENERATOR)


def all_quantized() -> list[tuple[list[int], float, float]]:
    return [quantized(row, X.tolist()) for row in WEIGHT.tolist()]


def test_the_integers_are_the_servers() -> None:
    found = all_quantized()
    values, scales = quantize(WEIGHT)
    assert [scale for _, scale, _ in found] == pytest.approx(scales.flatten().tolist(), rel=1e-6)
    ours = torch.tensor([integers for integers, _, _ in found])
    assert (ours == values).double().mean() > 0.9999  # a tie may be rounded either way
    assert (ours - values).abs().max() <= 1


def test_the_prediction_is_right_on_average() -> None:
    found = all_quantized()
    errors = [
        scale * float(torch.tensor(integers, dtype=torch.float64) @ X.double())
        - float(row.double() @ X.double())
        for (integers, scale, _), row in zip(found, WEIGHT, strict=True)
    ]
    # If the prediction is right, the mean square of error / prediction is 1.
    ratio = math.sqrt(
        statistics.mean((error / own) ** 2 for error, (_, _, own) in zip(errors, found, strict=True))
    )
    assert ratio == pytest.approx(1.0, abs=0.05)


# ---------------------------------------------------------------------- one way to solve it


def solution(row: Sequence[float], x: Sequence[float]) -> tuple[list[int], float, float]:
    """The step is the scale. The mean squares of uncorrelated errors add up."""
    scale = max(abs(weight) for weight in row) / 127
    integers = [round(weight / scale) for weight in row]
    return integers, scale, scale * math.sqrt(sum(value**2 for value in x) / 12)
