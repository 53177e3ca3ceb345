"""bfloat16 beside float32: each rounding is in its row, and changes the model as it did when the server had it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.micro import half_precision
from kernels import native

pytestmark = pytest.mark.skipif(
    not native.is_loaded() or not native.has_products(torch.bfloat16), reason="no native kernels here"
)


def test_every_rounding_is_compared_with_float32() -> None:
    (table,) = half_precision.accuracy(models=("zoo:llama-tiny",), tokens=60, texts=2, questions=3, answer=4)
    assert all(len(row) == len(table.columns) for row in table.rows)
    exact, *others = table.rows
    assert exact[2:] == [0, 0, 0, 0, 100, 3, 0]
    assert all(isinstance(row[4], float) and row[4] > 0 for row in others)
