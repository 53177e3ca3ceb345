"""What all kernels share: the choice between Triton, C++ and torch, and the device a launch goes to.

A module with a kernel holds side by side: a reference in plain torch, a Triton kernel with its launcher, a call of
the C++ kernel in the `.cpp` file of the same name, and one public function that picks. The reference is not only
there to be read: it is the code that runs where there is neither Triton nor a compiler, and what the kernels are
tested against. Attention alone has more ways than these: `kernels.attention` holds them, and there the reference of
the paged kernel is only to be read.
"""

import contextlib
import importlib.util
from typing import Literal

import torch

from kernels import native

# Triton is published for Linux only. Modules guard their kernels with this constant, so that on a Mac they
# still import and their torch path still works.
HAS_TRITON: bool = importlib.util.find_spec("triton") is not None


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on `tensor` (any shape) should launch Triton (True) or call torch (False).

    The answer depends on where the tensor lives and never on what is in it, so asking does not make the host
    wait for the device, and `torch.compile` settles it while tracing.
    """
    return HAS_TRITON and tensor.is_cuda


def use_native(tensor: torch.Tensor) -> bool:
    """Whether an operation on `tensor` (any shape) should call its C++ kernel."""
    return native.is_loaded() and tensor.device.type == "cpu"


def has_native_products(tensor: torch.Tensor) -> bool:
    """Whether an operation on `tensor` (any shape) should call a C++ kernel that is made of matrix products."""
    return use_native(tensor) and native.has_products(tensor.dtype)


def kernels_on(device: torch.device) -> Literal["triton", "native", "torch"]:
    """What computes on `device`: `triton`, `native` or `torch`."""
    if device.type == "cuda":
        return "triton" if HAS_TRITON else "torch"
    return "native" if native.is_loaded() else "torch"


def device_guard(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which Triton launches on the GPU that holds `tensor` (any shape).

    Triton launches on the *current* device and does not look where its arguments live: without the guard,
    work on `cuda:1` would be launched on `cuda:0`. On the CPU (Triton's interpreter) there is nothing to set.
    """
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
