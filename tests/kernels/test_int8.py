"""int8 weights: the error of quantizing, products compared with float64, and bits that depend on no other row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.gated_act import gated_act_reference
from kernels.int8 import Quantized, linear_int8_reference, quantize
from kernels.linear import pack_gated_linear, pack_linear, packed_gated_linear, packed_linear
from tests.kernels.support import BF16, DTYPES, FP32, draw

#: Outputs and inputs: fewer outputs than a panel, one more, sizes that are no multiples of a vector, a real layer.
SIZES = [(1, 2), (63, 16), (64, 42), (65, 576), (300, 42), (576, 1536)]
TOLERANCE = {FP32: 1e-4, BF16: 2**-7}


def quantized(outputs: int, inputs: int) -> Quantized:
    """Return a random matrix with a -128, which our own quantizing never gives but other programs may."""
    found = quantize(draw(outputs, inputs) / inputs**0.5)
    found.values[0, 0] = -128
    return found


def exact(x: Tensor, weight: Quantized) -> Tensor:
    return x.double() @ (weight.values.double() * weight.scales.double()).T


# ---------------------------------------------------------------------- quantizing


@settings(max_examples=40)
@given(outputs=st.integers(1, 70), inputs=st.integers(1, 90), dtype=st.sampled_from(DTYPES))
def test_no_weight_moves_by_more_than_half_a_step(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = draw(outputs, inputs, dtype=dtype) * torch.arange(outputs).view(-1, 1).to(dtype)  # row 0: zeros
    values, scales = quantize(weight)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.int8, FP32, (outputs, 1))
    error = (values.double() * scales.double() - weight.double()).abs()
    assert (error <= scales.double() * (0.5 + 1e-5)).all()
    assert (values.abs().amax(dim=1)[1:] == 127).all()
    assert not values[0].any()


# ---------------------------------------------------------------------- products


def layers_of(dtype: torch.dtype, outputs: int, inputs: int) -> list[tuple[Quantized, Callable[..., Tensor]]]:
    """Return a plain and a gated layer: the weights of each, and a function `layer(x, bias)`."""
    plain, gated = quantized(outputs, inputs), quantized(2 * outputs, inputs)
    panels, gated_panels = pack_linear(plain.values, dtype), pack_gated_linear(gated.values, dtype)
    assert panels is not None
    assert gated_panels is not None
    assert panels.dtype == gated_panels.dtype == torch.int8
    return [
        (plain, lambda x, bias=None: packed_linear(x, panels, outputs, bias, plain.scales)),
        (
            gated,
            lambda x, bias=None: packed_gated_linear(x, gated_panels, outputs, "silu", bias, gated.scales),
        ),
    ]


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_are_those_of_float64(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    (plain, linear), (gated, gated_linear) = layers_of(dtype, outputs, inputs)
    bias = draw(2 * outputs, dtype=dtype, seed=1)
    for rows in (0, 1, 2, 5, 7, 13, 16, 17, 31, 32, 33, 100):
        x = draw(rows, 2 * inputs, dtype=dtype, seed=rows)[:, inputs:]  # rows with gaps between them
        y, activated = exact(x, plain), exact(x, gated)
        for result, expected in (
            (linear(x), y),
            (linear(x, bias[:outputs]), y + bias[:outputs].double()),
            (linear_int8_reference(x, *plain, bias[:outputs]), y + bias[:outputs].double()),
            (gated_linear(x), gated_act_reference(activated, "silu")),
            (gated_linear(x, bias), gated_act_reference(activated + bias.double(), "silu")),
        ):
            assert result.dtype == dtype
            torch.testing.assert_close(
                result.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )


def test_a_panel_that_a_thread_kept_is_no_other_layers(dtype: torch.dtype) -> None:
    """A thread keeps memory for widened panels. Layers of different sizes use it in turns."""
    layers = [layers_of(dtype, outputs, inputs)[0] for outputs, inputs in ((64, 576), (64, 42), (130, 576))]
    for _ in range(2):
        for weight, layer in layers:
            x = draw(40, weight.values.shape[1], dtype=dtype)
            torch.testing.assert_close(
                layer(x).double(), exact(x, weight), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )
