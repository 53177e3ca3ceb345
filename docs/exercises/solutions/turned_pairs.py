"""Solution: each pair is a point in a plane, and turns at a speed of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence


def turned(vector: Sequence[float], position: int, theta: float) -> list[float]:
    half = len(vector) // 2
    result = [0.0] * len(vector)
    for i in range(half):
        angle = position / theta ** (2 * i / len(vector))
        x, y = vector[i], vector[i + half]
        result[i] = x * math.cos(angle) - y * math.sin(angle)
        result[i + half] = y * math.cos(angle) + x * math.sin(angle)
    return result
