"""Fixtures of the kernel tests: an implementation on a device.

Without a GPU, Triton kernels run in Triton's interpreter, on CPU tensors. Triton decides this when a function
is decorated, so `tests/conftest.py` sets `TRITON_INTERPRET` before anything imports Triton.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from kernels import native
from tests.kernels.support import ON_GPU, WAYS, Way


def require_triton(device: str) -> None:
    triton = pytest.importorskip("triton")
    if device == "cpu":
        if not triton.knobs.runtime.interpret:
            pytest.skip("kernels are compiled in this process: no Triton on CPU tensors")
        if isinstance(triton.language.sum, triton.runtime.JITFunction):
            pytest.fail("Triton was imported before TRITON_INTERPRET=1 was set: set it in tests/conftest.py")


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """The native kernels, which tests/conftest.py loads unless they are switched off."""
    try:
        native.find_compiler()
    except native.NativeKernelsError as error:
        pytest.skip(str(error))
    if os.environ.get("INFER_NATIVE_KERNELS", "true").lower() in ("false", "0"):
        pytest.skip("INFER_NATIVE_KERNELS switches the native kernels off")
    assert native.load_native_kernels()


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> str:
    """The device on which torch code runs."""
    return request.param


@pytest.fixture(params=["cpu", ON_GPU])
def triton_device(request: pytest.FixtureRequest) -> str:
    """The device on which Triton kernels run: interpreted on the CPU, compiled on a GPU."""
    require_triton(request.param)
    return request.param


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    """One implementation of a kernel: torch's, the native one or Triton's."""
    if request.param.name == "triton":
        require_triton(request.param.device)
    elif request.param.name == "native":
        request.getfixturevalue("native_kernels")
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest, native_kernels: None) -> torch.dtype:
    """A type in which the native kernels multiply matrices here. Tests of other kernels parametrize theirs."""
    if not native.has_products(request.param):
        pytest.skip(f"no products in {request.param} on this processor")
    return request.param


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of threads. With fewer rows than threads, a library may split a sum among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
