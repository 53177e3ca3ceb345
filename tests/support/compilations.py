"""Counts the kernels that Triton would compile, on a machine that has no GPU.

Triton looks a compiled kernel up by types, constants and properties of arguments (1, a multiple of 16). Before it
compiles a missing kernel, it calls `jit_cache_hook`. The hook here notes the kernel and the key, and returns that
the kernel is compiled already, so nothing is compiled and nothing runs.

Use it in a process of its own with `TRITON_INTERPRET=0`: kernels may not be decorated for the interpreter.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget

Compilations = dict[str, set[str]]  # for each kernel, the keys of its lookups


class AbsentGPU:
    """The part of a driver that the lookup of a kernel needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def collect() -> Compilations:
    """Make every later launch only add its key to the returned sets."""
    found: Compilations = {}

    def note(*, key: str, fn: Any, **others: Any) -> bool:
        found.setdefault(fn.name.rpartition(".")[2], set()).add(key)
        return True

    triton.runtime.driver.set_active(AbsentGPU())
    triton.knobs.runtime.jit_cache_hook = note
    return found
