"""Makes products of Triton's interpreter independent of the row's place, as on tensor cores."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest


def patch_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's `tl.dot` multiply bfloat16 correctly, and compute all rows alike.

    The interpreter keeps bfloat16 as 16-bit integers and, as of Triton 3.9, multiplies these integers
    (triton-lang/triton#11584). Also, NumPy's library adds in an order that depends on the row's place in the
    matrix. Compiled kernels have neither problem: an instruction of a tensor core computes all its rows in one
    order, which the tests marked `gpu` measure.
    """
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(x: Any) -> npt.NDArray[Any]:
        data: npt.NDArray[Any] = x.data
        if x.dtype.scalar == tl.bfloat16 and data.dtype == np.uint16:
            return (data.astype(np.uint32) << 16).view(np.float32)
        return data

    def create_dot(_: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        product = np.einsum("rk,kc->rc", widened(a), widened(b), dtype=d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
