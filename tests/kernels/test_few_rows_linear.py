"""Linear layers of few rows on a GPU: compared with float64, and the bits of a row beside others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import few_rows_linear
from kernels.batch_invariance import Product, product_keeps_bits
from kernels.dispatch import HAS_TRITON
from kernels.few_rows_linear import (
    FEW_ROWS,
    gated_linear,
    linear,
    takes,
    whole_sums,
)
from tests.kernels.interpreter import patch_dot
from tests.kernels.support import BF16, FP16, HALF_ULP, draw

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not published for this platform")

#: Inputs and outputs. The real ones are products of Llama 3.2 1B and of Qwen 3 0.6B, for a GPU.
SIZES = [(16, 16), (40, 70), (300, 33)]
REAL_SIZES = [(8192, 2048), (2048, 3072), (3072, 1024)]


@pytest.fixture
def place(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device on which the kernel computes."""
    if triton_device == "cpu":
        patch_dot(monkeypatch)
        monkeypatch.setattr(few_rows_linear, "takes", lambda x: x.shape[0] <= FEW_ROWS)
    return triton_device


def weight_of(inputs: int, outputs: int, dtype: torch.dtype, device: str) -> Tensor:
    return draw(outputs, inputs, dtype=dtype, device=device, seed=1) / inputs**0.5


def within_a_rounding(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    interpreted = actual.device.type == "cpu" and dtype == BF16  # it cuts bits off
    torch.testing.assert_close(
        actual.double().cpu(), exact.cpu(), rtol=(1 + interpreted) * HALF_ULP[dtype] * 1.01, atol=2e-5
    )


@pytest.mark.parametrize(
    ("size", "biased", "dtype"), [*((size, False, BF16) for size in SIZES), (SIZES[1], True, FP16)], ids=str
)
def test_every_output_is_the_sum_of_its_products(
    place: str, size: tuple[int, int], biased: bool, dtype: torch.dtype
) -> None:
    weight = weight_of(*size, dtype, place)
    bias = draw(size[1], dtype=dtype, device=place, seed=2) if biased else None
    for rows in (1, 3, 16, 17, FEW_ROWS):
        x = draw(rows, size[0], dtype=dtype, device=place)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        result = linear(x, weight, bias)
        assert result.is_contiguous()
        within_a_rounding(result, exact, dtype)
        sums = linear(x, weight, bias, wide=True)
        torch.testing.assert_close(sums, exact.float(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [(16, 16), (40, 35)], ids=str)
def test_gated_outputs_are_products_of_gate_and_up(
    place: str, size: tuple[int, int], biased: bool, activation: str
) -> None:
    inputs, outputs = size
    weight = weight_of(inputs, 2 * outputs, FP16, place)
    bias = draw(2 * outputs, dtype=FP16, device=place, seed=2) if biased else None
    for rows in (1, 5, 20):
        x = draw(rows, inputs, dtype=FP16, device=place)
        gate, up = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).chunk(2, 1)
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        result = gated_linear(x, weight, activation, bias)
        assert result.shape == (rows, outputs)
        # The products are rounded, too, and the activation may enlarge their error.
        torch.testing.assert_close(result.double(), gate * up, rtol=4e-3, atol=4e-3)


def test_a_row_has_the_same_bits_beside_any_others(place: str) -> None:
    weight = weight_of(300, 33, BF16, place)
    x = draw(FEW_ROWS, 300, dtype=BF16, device=place)
    if place == "cpu":  # the interpreter adds in another order in each tile: sums of whole numbers are exact
        weight, x = (300**0.5 * weight).round(), x.round()
    together = linear(x, weight)
    gated = gated_linear(x, weight[:32], "silu")
    for rows in (slice(0, 1), slice(40, 41), slice(20, 36), slice(10, 27)):
        assert torch.equal(linear(x[rows], weight), together[rows])
        assert torch.equal(gated_linear(x[rows], weight[:32], "silu"), gated[rows])


def test_a_nan_stays_in_its_row(place: str) -> None:
    weight, x = weight_of(40, 70, BF16, place), draw(4, 40, dtype=BF16, device=place)
    clean = linear(x, weight)
    x[1, 3] = torch.nan
    spoilt = linear(x, weight)
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.gpu
def test_the_kernel_and_the_library_give_the_same_bits() -> None:
    """One row is computed by the kernel, many rows by the library."""
    whole_sums()
    device = torch.device("cuda")
    assert takes(draw(FEW_ROWS, 8, dtype=BF16, device="cuda"))
    assert not takes(draw(FEW_ROWS + 1, 8, dtype=BF16, device="cuda"))
    assert not takes(draw(1, 8, device="cuda")), "float32 has no tensor cores"
    for inputs, outputs in REAL_SIZES:
        weight = weight_of(inputs, outputs, BF16, "cuda")
        bias = draw(outputs, dtype=BF16, device="cuda")
        for product in (
            Product(inputs, outputs, lambda x, w=weight: linear(x, w)),
            Product(inputs, outputs, lambda x, w=weight: linear(x, w, wide=True)),
            Product(inputs, outputs, lambda x, w=weight, b=bias: linear(x, w, b)),
            Product(inputs, outputs, lambda x, w=weight: gated_linear(x, w, "silu")),
            Product(inputs, outputs, lambda x, w=weight: gated_linear(x, w, "gelu_tanh")),
        ):
            assert product_keeps_bits(product, BF16, device)
