"""Exercise: what a rectangle costs."""

from __future__ import annotations

from collections.abc import Sequence


def wasted_tokens(prompt_lengths: Sequence[int], new_tokens: Sequence[int]) -> tuple[int, int]:
    """What phase 4 computes for nothing in one batch: (padded prompt tokens, idle rows of decode steps).

    Args:
        prompt_lengths: of each member.
        new_tokens: how many tokens each member generates. The first of them comes with the prompt's pass.
    """
    raise NotImplementedError("two sums")
