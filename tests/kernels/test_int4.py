"""Four bits by least squares: errors beside plain rounding, and groups that are no ordinary numbers."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch import Tensor

from kernels.grouped import Form, Layout, unpack
from kernels.int4 import FINER_FORM, FORM, HEAD_FORM, quantize
from tests.kernels.support import draw


def dequantized(weight: Tensor, form: Form = FORM) -> Tensor:
    layout = Layout.of(weight.shape[1], (len(weight),), (form,))
    return unpack(quantize(weight, layout), form, weight.shape[1])[: len(weight)]


def squared_errors(found: Tensor, weight: Tensor) -> Tensor:
    """Return each group's: [groups]."""
    return (found - weight).view(-1, 32).square().sum(dim=-1)


def test_errors_are_smaller_than_those_of_plain_rounding() -> None:
    weight = draw(75, 512)
    kind = gguf.GGMLQuantizationType.Q4_1
    plain = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
    ours, theirs = squared_errors(dequantized(weight), weight), squared_errors(plain, weight)
    assert ours.sum() < 0.9 * theirs.sum()
    assert (ours <= 1.01 * theirs).all()


def test_errors_of_six_bits_are_at_most_a_quarter_of_those_of_five() -> None:
    weight = draw(75, 512)
    kind = gguf.GGMLQuantizationType.Q5_1
    five = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
    ours, theirs = squared_errors(dequantized(weight, FINER_FORM), weight), squared_errors(five, weight)
    assert ours.sum() < 0.25 * theirs.sum()


@pytest.mark.parametrize("form", [FORM, FINER_FORM], ids=str)
def test_weights_that_were_quantized_before_keep_their_values(form: Form) -> None:
    kind = gguf.GGMLQuantizationType.Q4_1
    weight = torch.from_numpy(gguf.dequantize(gguf.quantize(draw(75, 512).numpy(), kind), kind))
    assert squared_errors(dequantized(weight, form), weight).sum() < 1e-5 * weight.square().sum()


def test_the_heads_eight_bits_are_near() -> None:
    weight = draw(33, 64)
    largest = weight.view(-1, 32).abs().amax(dim=-1)
    assert (
        squared_errors(dequantized(weight, HEAD_FORM), weight) <= 32 * (largest / 127 * 0.51).square()
    ).all()


def test_the_matrices_of_a_layer_are_quantized_one_by_one() -> None:
    weight = draw(80, 64)
    layout = Layout.of(64, (40, 40), (FORM, FORM))
    half = layout.byte_counts[0]
    panels = quantize(weight, layout)
    assert torch.equal(unpack(panels[:half], FORM, 64)[:40], dequantized(weight[:40]))
    assert torch.equal(unpack(panels[half:], FORM, 64)[:40], dequantized(weight[40:]))


@pytest.mark.parametrize("number", [0.0, 0.5, -3.0])
@pytest.mark.parametrize("form", [FORM, FINER_FORM], ids=str)
def test_a_group_of_one_number_stays(number: float, form: Form) -> None:
    weight = torch.full((2, 64), number)
    assert torch.equal(dequantized(weight, form), weight)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", [FORM, FINER_FORM, HEAD_FORM])
def test_a_group_that_is_not_finite_gives_no_finite_outputs(number: float, form: Form) -> None:
    weight = draw(2, 64)
    weight[1, 3] = number
    found = dequantized(weight, form)
    assert found[0].isfinite().all()
    assert not found[1, 3].isfinite()
    assert found[1, 32:].isfinite().all()
