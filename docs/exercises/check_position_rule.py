"""Compares `visible` with what the server's attention really reads."""

from __future__ import annotations

import pytest
import torch
from position_rule import visible

from kernels.attention import attention
from kernels.attention_layout import AttentionLayout


@pytest.mark.parametrize("window", [None, 1, 3, 4])
@pytest.mark.parametrize(("start", "queries"), [(0, 5), (3, 4), (6, 1), (0, 1)])
def test_attention_sees_what_the_rule_says(start: int, queries: int, window: int | None) -> None:
    columns = start + queries
    layout = AttentionLayout(torch.tensor([[0]]), torch.arange(1), columns, (queries,), (columns,), 1)
    # Column c's value is 1 at place c: what comes out shows who was read.
    q, k, v = torch.zeros(queries, 1, columns), torch.zeros(columns, 1, columns), torch.eye(columns)[:, None]
    stores = k[None].clone(), v[None].clone()
    out = attention(q, k[start:], v[start:], *stores, layout, scale=1.0, window=window)[:, 0]
    for row, position in enumerate(range(start, columns)):
        read = [c for c in range(columns) if out[row, c] > 0]
        assert read == [c for c in range(columns) if visible(position, c, window)]
