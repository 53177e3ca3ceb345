"""Exercise: which requests get a row in the next step, when the tokens of the last two steps have not been read?

Write `wants_row`, then run `.venv/bin/pytest docs/exercises/foreseen_ends.py`.
The check calls it in a pipeline with up to two steps in flight, and counts the rows.
"""

from __future__ import annotations

import pytest


def wants_row(
    read: int, on_their_way: int, max_new_tokens: int, *, prompt_tokens: int, max_seq_len: int
) -> bool:
    """Return whether one more token may be computed for a request that decodes.

    Args:
        read: number of generated tokens that the host has read.
        on_their_way: number of tokens that steps in flight are choosing. Any of them may end the answer.
        max_new_tokens: how many tokens the request may generate.
        prompt_tokens: the length of its prompt.
        max_seq_len: how many tokens of a sequence fit in the KV cache. All tokens but the latest are stored there.
    """
    raise NotImplementedError("a host that reads every token would say: read < max_new_tokens")


# ---------------------------------------------------------------------- the check


def rows_computed(max_new_tokens: int, prompt_tokens: int = 5, max_seq_len: int = 100, depth: int = 2) -> int:
    """Count the decode rows of one request, until `wants_row` returns False and no step is in flight.

    The count begins when the first generated token is in flight. `depth` is the largest number of steps in flight.
    """
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


# ---------------------------------------------------------------------- one way to solve it


def solution(
    read: int, on_their_way: int, max_new_tokens: int, *, prompt_tokens: int, max_seq_len: int
) -> bool:
    """Tokens in flight count as if they were read. A row stores the latest token and chooses the next one."""
    tokens = read + on_their_way
    return tokens < max_new_tokens and prompt_tokens + tokens <= max_seq_len
