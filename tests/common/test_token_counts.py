"""Counts of generated tokens that are updated at each step, compared with counting all tokens."""

from __future__ import annotations

from common.request import TokenCounts


def entries(counts: TokenCounts) -> list[tuple[int, int]]:
    _, token_ids, generated = counts.at_row(0).tolist()
    return list(zip(token_ids, generated, strict=True))


def test_the_past_is_not_read_again() -> None:
    counts = TokenCounts([7, 8, 9], 10, with_prompt=True)
    counts.catch_up([7, 8, 9, 4])
    counts.catch_up([0, 0, 0, 0, 4, 5])  # the zeros would be counted if the past were read again
    assert entries(counts) == [(7, 0), (8, 0), (9, 0), (4, 2), (5, 1)]
