"""Runs `wants_row` in a pipeline of two steps: rows for nobody, and answers that are too short."""

from __future__ import annotations

import pytest
from foreseen_ends import wants_row


def rows_computed(max_new_tokens: int, prompt_tokens: int = 5, max_seq_len: int = 100, depth: int = 2) -> int:
    """Decode rows of one request whose prompt has given the first token, until nothing more is asked for."""
    read, on_their_way, rows = 0, 1, 0
    for _ in range(500):
        if on_their_way == depth:
            read, on_their_way = read + 1, on_their_way - 1
        sizes = {"prompt_tokens": prompt_tokens, "max_seq_len": max_seq_len}
        if wants_row(read, on_their_way, max_new_tokens, **sizes):
            on_their_way, rows = on_their_way + 1, rows + 1
        elif on_their_way:
            read, on_their_way = read + 1, on_their_way - 1
        else:
            return rows
    raise AssertionError("it never ends")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 50])
def test_a_row_for_every_token_but_the_first_and_none_for_nobody(count: int, depth: int) -> None:
    assert rows_computed(count, depth=depth) == count - 1


@pytest.mark.parametrize("depth", [1, 2])
def test_no_column_past_the_longest_sequence(depth: int) -> None:
    assert rows_computed(50, prompt_tokens=7, max_seq_len=10, depth=depth) == 3
