"""Exercise: the position rule in one line."""

from __future__ import annotations


def visible(position: int, column: int, window: int | None) -> bool:
    """Whether the query at `position` sees `column` of its own sequence.

    Args:
        window: how many columns a query sees at most, its own included; None: all that came before.
    """
    raise NotImplementedError("your line goes here")
