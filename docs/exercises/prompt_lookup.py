"""Exercise: guess the next tokens of a text by looking up its last tokens in the text so far.

Write `guesses`, then run `.venv/bin/pytest docs/exercises/prompt_lookup.py`.
The check compares the guesses with the tokens that followed in the text before.
"""

from __future__ import annotations

import pytest


def guesses(token_ids: list[int], limit: int, shortest: int = 2, longest: int = 4) -> list[int]:
    """Return up to `limit` guesses of the tokens that follow a text.

    Look up the text's last n tokens in the text before them, for n from `longest` down to `shortest`. If they occur
    there, the guesses are the tokens that follow their latest occurrence.

    Args:
        token_ids: the text, which is the prompt and the generated tokens.
        limit: the largest number of guesses.
        shortest, longest: the smallest and the largest n.

    Returns:
        The guesses; [] if the last tokens did not occur before.
    """
    raise NotImplementedError("the last tokens are token_ids[-n:], for n from longest down to shortest")


# ---------------------------------------------------------------------- the check


def test_nothing_is_guessed_for_a_text_that_does_not_repeat() -> None:
    assert guesses([1, 2, 3, 4, 5], 4) == []
    assert guesses([1, 2, 3, 1], 4) == [], "one token is too little"


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_what_followed_before_is_guessed(limit: int) -> None:
    assert guesses([5, 6, 7, 8, 9, 5, 6], limit) == [7, 8, 9, 5, 6][:limit]


def test_longer_runs_are_looked_up_first() -> None:
    assert guesses([1, 2, 3, 40, 2, 3, 50, 1, 2, 3], 1) == [40]


def test_the_latest_place_is_taken() -> None:
    assert guesses([2, 3, 40, 2, 3, 50, 2, 3], 1) == [50]


# ---------------------------------------------------------------------- one way to solve it


def solution(token_ids: list[int], limit: int, shortest: int = 2, longest: int = 4) -> list[int]:
    """Search the earlier tokens backwards. Phase 10 uses a dictionary, which stays quick on long texts."""
    for n in range(longest, shortest - 1, -1):
        last = token_ids[-n:]
        for end in range(len(token_ids) - 1, n - 1, -1):
            if token_ids[end - n : end] == last:
                return token_ids[end : end + limit]
    return []
