"""Exercise: rotary embedding, one pair at a time."""

from __future__ import annotations

from collections.abc import Sequence


def turned(vector: Sequence[float], position: int, theta: float) -> list[float]:
    """A head's query or key, turned to its position.

    Number i is paired with number i + D/2, for i from 0 to D/2 - 1, and the pair is turned by the angle
    position / theta ** (2 i / D): x, y become x cos - y sin, y cos + x sin.

    Args:
        vector: D numbers, D even.
    """
    raise NotImplementedError("a loop over pairs")
