"""Counts of generated tokens, kept from step to step, against counting them all."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from common.token_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 9), max_size=30)


def entries(counts: TokenCounts) -> list[tuple[int, int]]:
    _, token_ids, generated = counts.at_row(0).tolist()
    return list(zip(token_ids, generated, strict=True))


@given(prompt=TOKENS, pieces=st.lists(TOKENS, max_size=4), with_prompt=st.booleans())
def test_any_pieces_against_a_counter(prompt: list[int], pieces: list[list[int]], with_prompt: bool) -> None:
    counts = TokenCounts(prompt, sum(map(len, pieces)), with_prompt=with_prompt)
    token_ids = list(prompt)
    for piece in [[], *pieces]:
        token_ids += piece
        counts.catch_up(token_ids)
        counts.catch_up(token_ids)
        generated = Counter(token_ids[len(prompt) :])
        known = set(prompt if with_prompt else ()) | generated.keys()
        assert sorted(entries(counts)) == sorted((token, generated[token]) for token in known)


def test_the_past_is_not_read_again() -> None:
    counts = TokenCounts([7, 8, 9], 10, with_prompt=True)
    counts.catch_up([7, 8, 9, 4])
    counts.catch_up([0, 0, 0, 0, 4, 5])  # a past that would tell on whoever read it
    assert entries(counts) == [(7, 0), (8, 0), (9, 0), (4, 2), (5, 1)]


def test_entries_follow_their_row() -> None:
    counts = TokenCounts([7, 8], 10, with_prompt=True)
    token_ids = [7, 8]
    for row, token_id in ((3, 4), (3, 7), (0, 5)):
        assert set(counts.at_row(row)[0].tolist()) == {row}
        token_ids.append(token_id)
        counts.catch_up(token_ids)
        assert set(counts.at_row(row)[0].tolist()) == {row}
    assert entries(counts) == [(7, 1), (8, 0), (4, 1), (5, 1)]
