"""Exercise: sample a token from its scores with one random number.

Write `draw`, then run `.venv/bin/pytest docs/exercises/inverse_cdf.py`.
The check compares its tokens with those that the server's sampler draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from common.request import Request, SamplingParams
from common.sampling.draw import sample


def draw(logits: Sequence[float], u: float, temperature: float, top_k: int | None) -> int:
    """Return the id of the token that the random number `u` chooses.

    Keep the `top_k` highest scores (None: all), turn them into probabilities that sum to 1, and take the first
    token at which their running sum exceeds `u`. With a `top_k`, tokens are summed from the most likely one on,
    and equally likely ones in the order of their ids. Without one, all are summed in the order of their ids.

    Args:
        logits: a score for each token id.
        u: a random number in [0, 1).
        temperature: the divisor of the scores; above 0.
    """
    raise NotImplementedError("scores, an order, exponentials, a running sum")


# ---------------------------------------------------------------------- the check

VOCAB, DRAWS = 50, 40


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 5])
def test_the_same_number_gives_the_same_token(temperature: float, top_k: int | None) -> None:
    logits = torch.randn(DRAWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 7] = logits[:, 3]  # equal scores
    requests = [
        Request(f"r{i}", [0], SamplingParams(temperature=temperature, top_k=top_k, seed=i))
        for i in range(DRAWS)
    ]
    expected = sample(logits, requests).token_ids.tolist()
    found = [
        draw(row, request.next_uniform(), temperature, top_k)
        for row, request in zip(logits.tolist(), requests, strict=True)
    ]
    assert found == expected


# ---------------------------------------------------------------------- one way to solve it


def solution(logits: Sequence[float], u: float, temperature: float, top_k: int | None) -> int:
    """Sort first, so that the tokens that `top_k` removes are at the end."""
    ids = list(range(len(logits)))
    if top_k is not None:
        ids = sorted(ids, key=lambda i: (-logits[i], i))[:top_k]
    best = max(logits)  # subtracted, so that the largest exponential is 1 and none overflows
    weights = [math.exp((logits[i] - best) / temperature) for i in ids]
    total = sum(weights)
    for token_id, sum_ in zip(ids, itertools.accumulate(weights), strict=True):
        if sum_ > u * total:
            return token_id
    return ids[-1]
