"""Prices from measured steps: `time = a × passes + b × columns + … `, with no price below zero.

Steps differ a thousandfold in length, and the errors of long steps are larger. So a step's error is weighted like
that of a count: by the inverse of the expected value (Poisson regression with an identity link). Weighed so,
all steps together take as long as they were measured to, however wrong each of them is.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ROUNDS = 8  # of weighing anew; the prices stop moving after five or so
SHORTEST_S = 1e-5  # a step is expected to take so long at least


def fit_prices(amounts: Floats, seconds: Floats) -> Floats:
    """Fit a price for each column of `amounts`, in seconds, none below zero.

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
    """Return the non-negative prices with the least weighted sum of squares.

    Every subset of the few kinds is tried: its prices without a limit, 0 for the other kinds. Of the subsets whose
    prices are all positive, the one with the least error wins.
    """
    scale = np.sqrt((weights[:, None] * amounts**2).sum(0))
    kinds = np.flatnonzero(scale)
    scaled = amounts[:, kinds] / scale[kinds]
    products = scaled.T @ (weights[:, None] * scaled)
    wanted = scaled.T @ (weights * seconds)
    best, least = np.zeros(len(kinds)), 0.0  # error beyond that of no prices at all
    for size in range(1, len(kinds) + 1):
        for chosen in map(list, itertools.combinations(range(len(kinds)), size)):
            found = np.linalg.lstsq(products[np.ix_(chosen, chosen)], wanted[chosen], rcond=None)[0]
            error = -float(wanted[chosen] @ found)
            if (found >= 0).all() and error < least:
                best, least = np.zeros(len(kinds)), error
                best[chosen] = found
    prices = np.zeros(amounts.shape[1])
    prices[kinds] = best / scale[kinds]
    return prices
