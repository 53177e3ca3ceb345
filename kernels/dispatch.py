"""Chooses between Triton, C++ and torch for all kernels, and the device of a launch.

A module with a kernel has up to four parts: a reference in plain torch, a Triton kernel with its launcher, a call
of the C++ kernel in the `.cpp` file of the same name, and a public function that chooses. The reference runs
where neither kernel can, and the kernels are tested against the reference. Attention has more
implementations, in `kernels.attention`. References of kernels that only a GPU needs are for reading and tests.
"""

import contextlib
import importlib.util
import os
from typing import Literal

import torch

from kernels import native

# Triton is published for Linux only. Modules guard their kernels with this constant, so that on a Mac they
# still import and their torch path still works.
HAS_TRITON: bool = importlib.util.find_spec("triton") is not None

#: With INFER_INTERPRET_TRITON=true a CPU computes by Triton's kernels, too, in Triton's interpreter. That is very
#: slow. It runs the path of a GPU on machines that have none.
INTERPRETED: bool = HAS_TRITON and os.environ.get("INFER_INTERPRET_TRITON", "").lower() in ("1", "true")
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported

Kernels = Literal["triton", "native", "torch"]

_NOTHING_TO_SET = contextlib.nullcontext()


def use_triton(tensor: torch.Tensor) -> bool:
    """Return whether an operation on `tensor` (any shape) should launch its Triton kernel.

    The answer depends on the tensor's device and never on its values. So the host does not wait for the device, and
    `torch.compile` decides it while tracing.
    """
    return HAS_TRITON and (tensor.is_cuda or INTERPRETED)


def use_native(tensor: torch.Tensor) -> bool:
    """Return whether an operation on `tensor` (any shape) should call its C++ kernel."""
    return native.is_loaded() and tensor.device.type == "cpu"


def has_native_products(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether an operation on `tensor` (any shape) should call a C++ kernel that uses matrix products.

    Args:
        tensor: weights or activations.
        dtype: the type of the activations; default: that of `tensor`.
    """
    return use_native(tensor) and native.has_products(dtype or tensor.dtype)


def kernels_on(device: torch.device) -> Kernels:
    """Return the kind of kernels used on `device`: `triton`, `native` or `torch`."""
    if device.type == "cuda" or INTERPRETED:
        return "triton" if HAS_TRITON else "torch"
    return "native" if native.is_loaded() else "torch"


def device_guard(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context manager in which Triton launches on the GPU of `tensor` (any shape).

    Triton launches on the *current* device, whatever the device of its arguments: without the guard, work on
    `cuda:1` would be launched on `cuda:0`. If the GPU is the current device already, the context manager does
    nothing, which saves several microseconds a launch. For a CPU (Triton's interpreter), it does nothing, too.
    """
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _NOTHING_TO_SET
