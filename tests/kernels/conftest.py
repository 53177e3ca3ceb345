"""Devices and tolerances for the kernel tests.

Without a GPU, Triton kernels run in Triton's interpreter, on CPU tensors. Triton decides this when a function
is decorated, its own library's included, so `TRITON_INTERPRET` must be set before anything imports Triton.
Setting it here is enough when this folder is run alone; in a run of all tests another folder imports Triton
first (transformers does), so `tests/conftest.py` sets it too. `triton_device` fails if neither came in time.
"""

import os
from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)

# Half a unit in the last place, relative to the value: what one rounding to nearest may cost. In float32 the
# bound is on the arithmetic instead: sums of a few thousand squares.
HALF_ULP = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(params=["cpu", ON_GPU])
def device(request: pytest.FixtureRequest) -> str:
    """Where torch code runs."""
    return request.param


@pytest.fixture(params=["cpu", ON_GPU])
def triton_device(request: pytest.FixtureRequest) -> str:
    """Where Triton kernels run: interpreted on the CPU, compiled on a GPU."""
    triton = pytest.importorskip("triton")
    if request.param == "cpu":
        if not triton.knobs.runtime.interpret:
            pytest.skip("kernels are compiled in this process: no Triton on CPU tensors")
        if isinstance(triton.language.sum, triton.runtime.JITFunction):
            pytest.fail("Triton was imported before TRITON_INTERPRET=1 was set: set it in tests/conftest.py")
    return request.param


@pytest.fixture
def assert_rounded() -> Callable[..., None]:
    """assert_rounded(actual, exact): `actual` is `exact` (in float32 or more) but for rounding.

    `roundings` says how many roundings to nearest the computation may do. A result of the interpreter may be
    off by one more, because it makes bfloat16 by cutting float32 off.
    """

    def check(
        actual: torch.Tensor, exact: torch.Tensor, *, roundings: int = 1, interpreted: bool = False
    ) -> None:
        assert actual.shape == exact.shape
        assert exact.dtype in (torch.float32, torch.float64)
        tolerance = (roundings + interpreted) * HALF_ULP[actual.dtype] * 1.01
        torch.testing.assert_close(actual.double(), exact.double(), rtol=tolerance, atol=2e-6)

    return check
