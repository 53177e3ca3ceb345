"""What Triton would compile, counted on a machine that has no GPU.

Triton looks a compiled kernel up by types, constants and properties of arguments (1, a multiple of 16), and asks
its `jit_cache_hook` before it compiles one that is missing. The hook here notes the kernel and the key, and says
that somebody else has compiled it, so nothing is compiled and nothing runs.

For processes of their own: kernels must not have been decorated for the interpreter (`TRITON_INTERPRET=0`).
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget

Compilations = dict[str, set[str]]  # of each kernel, the keys it was looked up by


class AbsentGPU:
    """As much of a driver as looking up a kernel takes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def collect() -> Compilations:
    """From now on launches do nothing but add to what is returned."""
    found: Compilations = {}

    def note(*, key: str, fn: Any, **others: Any) -> bool:
        found.setdefault(fn.name.rpartition(".")[2], set()).add(key)
        return True

    triton.runtime.driver.set_active(AbsentGPU())
    triton.knobs.runtime.jit_cache_hook = note
    return found
