"""Solution: an order first, so that what is cut off is at its end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def draw(logits: Sequence[float], u: float, temperature: float, top_k: int | None) -> int:
    ids = list(range(len(logits)))
    if top_k is not None:
        ids = sorted(ids, key=lambda i: (-logits[i], i))[:top_k]
    best = max(logits)  # the largest exponential is 1: none overflows
    weights = [math.exp((logits[i] - best) / temperature) for i in ids]
    total = sum(weights)
    for token_id, sum_ in zip(ids, itertools.accumulate(weights), strict=True):
        if sum_ > u * total:
            return token_id
    return ids[-1]
