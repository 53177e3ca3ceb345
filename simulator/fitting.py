"""Prices from measured steps: `time = a × passes + b × columns + … `, with no price below zero.

Steps differ a thousandfold in length, and what makes one late (another process, a page fault) only ever adds. So a
step's error is weighed as that of a count is: by the inverse of what is expected (Poisson regression with an identity
link). Weighed so, all steps together take as long as they were measured to, however wrong each of them is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ROUNDS = 8  # of weighing anew; the prices stop moving after five or so
SWEEPS = 10_000
SHORTEST_S = 1e-5  # a step is expected to take so long at least


def fit_prices(amounts: Floats, seconds: Floats) -> Floats:
    """A price for each column of `amounts`, in seconds, none below zero.

    Args:
        amounts: [steps, kinds] how much of each kind a step has.
        seconds: [steps] how long it took.

    Returns:
        [kinds]; 0 for a kind that no step has any of.

    Raises:
        ValueError: there are no steps.
    """
    if not len(seconds):
        raise ValueError("there are no steps to fit prices to")
    expected = np.full(len(seconds), seconds.mean())
    for _ in range(ROUNDS):
        prices = nonnegative_least_squares(amounts, seconds, 1 / np.maximum(expected, SHORTEST_S))
        expected = amounts @ prices
    return prices


def nonnegative_least_squares(amounts: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Prices that make the weighted sum of squares least: each in turn is set to its best, until none moves."""
    scale = np.sqrt((weights[:, None] * amounts**2).sum(0))
    scale[scale == 0] = 1.0
    scaled = amounts / scale
    products = scaled.T @ (weights[:, None] * scaled)
    wanted = scaled.T @ (weights * seconds)
    prices = np.zeros(len(wanted))
    kinds = np.flatnonzero(products.diagonal())
    for _ in range(SWEEPS):
        moved = 0.0
        for kind in kinds:
            best = max(0.0, prices[kind] + (wanted[kind] - products[kind] @ prices) / products[kind, kind])
            moved = max(moved, abs(best - prices[kind]))
            prices[kind] = best
        if moved <= 1e-8 * prices.max():
            break
    return prices / scale
