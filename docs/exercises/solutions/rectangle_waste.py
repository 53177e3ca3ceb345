"""Solution: both kinds of waste are distances to the longest."""

from __future__ import annotations

from collections.abc import Sequence


def wasted_tokens(prompt_lengths: Sequence[int], new_tokens: Sequence[int]) -> tuple[int, int]:
    padded = sum(max(prompt_lengths) - length for length in prompt_lengths)
    idle = sum(
        max(new_tokens) - count for count in new_tokens
    )  # the prompt's pass drops out of the difference
    return padded, idle
