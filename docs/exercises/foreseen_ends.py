"""Exercise: which requests get a row in the next step, when the tokens of the last two have not been read?"""

from __future__ import annotations


def wants_row(
    read: int, on_their_way: int, max_new_tokens: int, *, prompt_tokens: int, max_seq_len: int
) -> bool:
    """Whether one more token may be computed for a request that decodes.

    Args:
        read: generated tokens that the host has seen.
        on_their_way: those that steps in flight are choosing; none of them is known to end the answer.
        max_new_tokens: how many it may have.
        prompt_tokens: the length of its prompt.
        max_seq_len: columns that a sequence may have; every token but the latest takes one.
    """
    raise NotImplementedError("a host that reads every token would say: read < max_new_tokens")
