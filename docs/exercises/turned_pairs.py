"""Exercise: rotary embedding, one pair at a time.

Write `turned`, then run `.venv/bin/pytest docs/exercises/turned_pairs.py`.
The check compares it with the model's own rotary embedding. A second check shows its purpose: the product of a
query and a key depends only on the distance between their positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from common.models.config import RopeConfig
from common.models.layers import RotaryTable
from kernels.rope import rope_reference


def turned(vector: Sequence[float], position: int, theta: float) -> list[float]:
    """Return a head's query or key after rotary embedding: each pair of numbers is turned by an angle.

    Number i is paired with number i + D/2, for i from 0 to D/2 - 1. The pair (x, y) is turned by the angle
    a = position / theta ** (2 i / D): it becomes (x cos a - y sin a, y cos a + x sin a).

    Args:
        vector: D numbers, D even.
    """
    raise NotImplementedError("a loop over pairs")


# ---------------------------------------------------------------------- the check

SIZE, THETA = 8, 10_000.0
QUERY, KEY = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("position", [0, 1, 7, 100])
def test_it_is_the_models(position: int) -> None:
    table = RotaryTable(RopeConfig(THETA), SIZE, 128)
    table.fill()
    cos, sin = table(torch.tensor([position]))
    q, k = torch.tensor([QUERY]).view(1, 1, SIZE), torch.tensor([KEY]).view(1, 1, SIZE)
    expected = [each.flatten().tolist() for each in rope_reference(q, k, cos, sin)]
    assert turned(QUERY, position, THETA) == pytest.approx(expected[0], abs=1e-5)
    assert turned(KEY, position, THETA) == pytest.approx(expected[1], abs=1e-5)


@pytest.mark.parametrize("moved", [1, 13, 500])
def test_a_product_depends_on_the_distance_alone(moved: int) -> None:
    def score(query_at: int, key_at: int) -> float:
        pairs = zip(turned(QUERY, query_at, THETA), turned(KEY, key_at, THETA), strict=True)
        return sum(x * y for x, y in pairs)

    assert score(9 + moved, 4 + moved) == pytest.approx(score(9, 4))
    assert score(9, 4) != pytest.approx(score(9, 3))


# ---------------------------------------------------------------------- one way to solve it


def solution(vector: Sequence[float], position: int, theta: float) -> list[float]:
    """Each pair is a point in a plane. The larger i, the smaller the angle by which its pair turns."""
    half = len(vector) // 2
    result = [0.0] * len(vector)
    for i in range(half):
        angle = position / theta ** (2 * i / len(vector))
        x, y = vector[i], vector[i + half]
        result[i] = x * math.cos(angle) - y * math.sin(angle)
        result[i + half] = y * math.cos(angle) + x * math.sin(angle)
    return result
