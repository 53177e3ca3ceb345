"""Solution: what is on its way counts. Each token is computed from the column of the one before it."""

from __future__ import annotations


def wants_row(
    read: int, on_their_way: int, max_new_tokens: int, *, prompt_tokens: int, max_seq_len: int
) -> bool:
    tokens = read + on_their_way
    return tokens < max_new_tokens and prompt_tokens + tokens <= max_seq_len
