"""Solution: causality and the window are the same comparison, made from two sides."""

from __future__ import annotations


def visible(position: int, column: int, window: int | None) -> bool:
    return column <= position and (window is None or position - column < window)
