"""Exercise: multiply by weights in groups, without a multiplication by a scale for each weight.

Write `product`, then run `.venv/bin/pytest docs/exercises/group_sums.py`.
The check compares your outputs with the server's, and counts your multiplications by scales and mins.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kernels.grouped import Layout, grouped_linear
from kernels.int4 import FORM, in_groups, quantize


def product(
    values: Sequence[int], scales: Sequence[float], mins: Sequence[float], x: Sequence[float]
) -> float:
    """Multiply the weights of one output by inputs.

    Weight k of group g is scales[g] * values[k] - mins[g], and a group has 32 weights. But do not compute the
    weights: each scale and each min may be a factor of one multiplication only.

    Args:
        values: K integers from 0 to 15.
        scales: of each group, K / 32 in all.
        mins: the same.
        x: K inputs.

    Returns:
        The sum of x[k] * weight[k].
    """
    raise NotImplementedError("two sums for each group")


# ---------------------------------------------------------------------- the check

OUTPUTS, INPUTS = 40, 256
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(OUTPUTS, INPUTS, generator=GENERATOR)
X = torch.randn(1, INPUTS, generator=GENERATOR)
GROUPS = in_groups(WEIGHT, FORM)


class Counted(float):
    """A number that counts its multiplications."""

    count = 0

    def __mul__(self, other: float) -> float:
        Counted.count += 1
        return float(self) * other

    __rmul__ = __mul__


def all_products() -> list[float]:
    assert GROUPS.mins is not None
    rows = zip(GROUPS.values.tolist(), GROUPS.scales.tolist(), GROUPS.mins.tolist(), strict=True)
    Counted.count = 0
    return [
        product(values, [Counted(scale) for scale in scales], [Counted(low) for low in mins], X[0].tolist())
        for values, scales, mins in rows
    ]


def test_the_outputs_are_the_servers() -> None:
    layout = Layout.of(INPUTS, (OUTPUTS,), (FORM,))
    expected = grouped_linear(X, quantize(WEIGHT, layout), layout)[0]
    assert all_products() == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-4)


def test_a_group_has_two_multiplications_by_its_scale_and_min() -> None:
    all_products()
    assert Counted.count == OUTPUTS * INPUTS // 32 * 2


# ---------------------------------------------------------------------- one way to solve it


def solution(
    values: Sequence[int], scales: Sequence[float], mins: Sequence[float], x: Sequence[float]
) -> float:
    """A group's scale and min are common to all its terms, so they leave both sums."""
    total = 0.0
    for group, (scale, low) in enumerate(zip(scales, mins, strict=True)):
        places = range(32 * group, 32 * group + 32)
        total += scale * sum(x[k] * values[k] for k in places) - low * sum(x[k] for k in places)
    return total
