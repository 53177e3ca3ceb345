"""Exercise: from scores and one number to a token."""

from __future__ import annotations

from collections.abc import Sequence


def draw(logits: Sequence[float], u: float, temperature: float, top_k: int | None) -> int:
    """The token that a number chooses.

    Keep the `top_k` highest scores (None: all), turn them into probabilities that sum to 1, and take the first
    token at which their running sum exceeds `u`. With a `top_k` tokens are summed up from the most likely one on,
    equal ones by their ids; without, in the order of their ids.

    Args:
        logits: a score for each token id.
        u: in [0, 1).
        temperature: what scores are divided by; above 0.
    """
    raise NotImplementedError("scores, an order, exponentials, a running sum")
