"""Exercise: which tokens a pass computes, where they stand, and which row's logits choose the next one."""

from __future__ import annotations

from collections.abc import Sequence


def what_is_new(token_ids: Sequence[int], held: int, most: int) -> tuple[list[int], list[int], int | None]:
    """What the next pass over a text computes.

    Args:
        token_ids: the text so far.
        held: how many of its tokens the cache holds, from the first on; fewer than there are.
        most: how many tokens a pass may compute.

    Returns:
        The tokens that it computes, their positions, and which of them the next token is chosen after: its place
        among them, or None if the text's last token is not yet computed.
    """
    raise NotImplementedError("three slices")
