"""Changes to Triton's interpreter: products as on tensor cores, and calls of functions that cost less time."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest


def prepare_functions_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save up to half the time of a kernel in the interpreter.

    The interpreter replaces the functions of `triton.language` before each launch, and again, to the same effect,
    whenever a kernel calls another function. Only the first of these calls in a launch does something now. The
    interpreter also builds a table of all types whenever it asks for one; now each answer is kept.
    """
    from triton.runtime import interpreter

    find_type, replace, launch = (
        interpreter._get_np_dtype,
        interpreter._patch_lang,
        interpreter.GridExecutor.__call__,
    )
    types: dict[str, npt.DTypeLike] = {}  # NumPy's types by the names of Triton's, which cannot be hashed
    replaced: set[frozenset[str]] = set()  # by the modules of `triton.language` that a function sees

    def numpy_type(kind: Any) -> npt.DTypeLike:
        if kind.name not in types:
            types[kind.name] = find_type(kind)
        return types[kind.name]

    @functools.cache
    def modules_of(function: Any) -> frozenset[str]:
        modules = filter(inspect.ismodule, function.__globals__.values())
        return frozenset(each.__name__ for each in modules if each.__name__.startswith("triton.language"))

    def replace_once(function: Any) -> Any:
        seen = modules_of(function)
        if seen in replaced:
            return None  # a call within a launch: the interpreter ignores the result
        replaced.add(seen)
        return replace(function)

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> None:
        replaced.clear()  # the end of the launch before has restored the functions
        launch(self, *arguments, **options)

    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type)
    monkeypatch.setattr(interpreter, "_patch_lang", replace_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)


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
