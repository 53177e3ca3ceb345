"""Exercise: the position rule in one line.

Write `visible`, then run `.venv/bin/pytest docs/exercises/position_rule.py`.
The check compares it with the columns that the server's attention really reads.
"""

from __future__ import annotations

import pytest
import torch

from kernels.attention import attention
from kernels.attention_layout import AttentionLayout


def visible(position: int, column: int, window: int | None) -> bool:
    """Return whether the query of the token at `position` sees the key at `column` of its own sequence.

    Args:
        position, column: indices of two tokens in their sequence.
        window: how many columns a query sees at most, its own included; None: its own and all before it.
    """
    raise NotImplementedError("your line goes here")


# ---------------------------------------------------------------------- the check


@pytest.mark.parametrize("window", [None, 1, 3, 4])
@pytest.mark.parametrize(("start", "queries"), [(0, 5), (3, 4), (6, 1), (0, 1)])
def test_attention_sees_what_the_rule_says(start: int, queries: int, window: int | None) -> None:
    columns = start + queries
    layout = AttentionLayout(torch.tensor([[0]]), torch.arange(1), columns, (queries,), (columns,), 1)
    # The value of column c is 1 at index c and 0 elsewhere, so the output shows which columns were read.
    q, k, v = torch.zeros(queries, 1, columns), torch.zeros(columns, 1, columns), torch.eye(columns)[:, None]
    stores = k[None].clone(), v[None].clone()
    out = attention(q, k[start:], v[start:], *stores, layout, scale=1.0, window=window)[:, 0]
    for row, position in enumerate(range(start, columns)):
        read = [c for c in range(columns) if out[row, c] > 0]
        assert read == [c for c in range(columns) if visible(position, c, window)]


# ---------------------------------------------------------------------- one way to solve it


def solution(position: int, column: int, window: int | None) -> bool:
    """The column is not after the query, and less than a window before it."""
    return column <= position and (window is None or position - column < window)
