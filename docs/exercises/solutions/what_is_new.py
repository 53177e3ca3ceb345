"""Solution: decode is `most` of 1, a prompt without chunks is `most` without end; the line is the same."""

from __future__ import annotations

from collections.abc import Sequence


def what_is_new(token_ids: Sequence[int], held: int, most: int) -> tuple[list[int], list[int], int | None]:
    end = min(held + most, len(token_ids))
    row = end - held - 1 if end == len(token_ids) else None
    return list(token_ids[held:end]), list(range(held, end)), row
