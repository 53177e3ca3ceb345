"""Weights in groups: panels and back, products compared with float64, and bits that depend on no other row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.models.gguf.groups import KINDS
from kernels import int4
from kernels.gated_act import gated_act_reference
from kernels.grouped import (
    Form,
    Groups,
    Layout,
    grouped_gated_linear,
    grouped_linear,
    grouped_linear_reference,
    grouped_rows,
    pack_into,
    unpack,
)
from tests.kernels.support import BF16, FP32, draw

#: Groups of several blocks, as in GPTQ, AWQ and compressed-tensors checkpoints.
LARGER = [
    *(Form(4, blocks=2), Form(4, blocks=4), Form(8, blocks=4)),
    *(Form(4, blocks=4, groups=1, mins=True), Form(8, blocks=2, groups=1, mins=True)),
]
#: Every form that a file may have, or that a checkpoint is quantized to.
FORMS = sorted({kind.form for kind in KINDS.values()}.union(LARGER, [int4.FINER_FORM]))
#: Fewer outputs than a panel; several panels, the last of them with some; whole panels.
OUTPUTS = [1, 75, 256]
TOLERANCE = {FP32: 1e-5, BF16: 2**-7}

EVERY_FORM = pytest.mark.parametrize("form", FORMS, ids=str)


def draw_groups(form: Form, outputs: int, inputs: int) -> Groups:
    """Return random groups, with every number that the form can hold."""
    generator = torch.Generator().manual_seed(outputs)

    def numbers(low: int, high: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (outputs, columns), generator=generator).to(dtype)

    units, groups = inputs // (32 * form.blocks), inputs // 32 * form.groups
    values = numbers(0, 2**form.bits, inputs, torch.uint8)
    scales = [torch.rand(outputs, units, generator=generator).half() / 20 for _ in range(1 + form.mins)]
    codes = [numbers(-128, 128, groups, torch.int8) for _ in range(1 + form.mins) if form.groups]
    return Groups(
        values.view(torch.int8) if form.bits == 8 else values,
        scales[0],
        scales[1] if form.mins else None,
        codes[0] if codes else None,
        codes[1] if form.mins and codes else None,
    )


def exact(groups: Groups, form: Form) -> Tensor:
    """Return the weights in float64, from their definition."""
    q = groups.values.double() - (0 if form.mins or form.bits == 8 else 2 ** (form.bits - 1))

    def each(units: Tensor, codes: Tensor | None) -> Tensor:
        factors = units.double().repeat_interleave(32 * form.blocks, dim=1)
        if codes is None:
            return factors
        return factors * codes.double().repeat_interleave(32 // form.groups, dim=1)

    weights = q * each(groups.scales, groups.codes)
    return weights if groups.mins is None else weights - each(groups.mins, groups.min_codes)


def packed(groups: Groups, form: Form) -> Tensor:
    panels = torch.full((form.num_bytes(*groups.values.shape),), 255, dtype=torch.uint8)
    pack_into(panels, groups, form)
    return panels


# ---------------------------------------------------------------------- panels


@EVERY_FORM
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("native", [True, False])
def test_panels_hold_the_weights(
    form: Form, outputs: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = draw_groups(form, outputs, 512)
    if not native:
        monkeypatch.setattr("kernels.grouped.use_native", lambda _: False)
    found = unpack(packed(groups, form), form, 512)
    torch.testing.assert_close(found[:outputs].double(), exact(groups, form), rtol=1e-6, atol=1e-5)
    assert not found[outputs:].any()


@EVERY_FORM
def test_rows_of_a_matrix(form: Form, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    panels, layout = packed(draw_groups(form, 75, 512), form), Layout.of(512, (75,), (form,))
    rows = torch.tensor([74, 0, 31, 32, 33, 0])
    expected = unpack(panels, form, 512)[rows]
    for _ in ("native", "torch"):
        found = grouped_rows(rows, panels, layout, dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected.to(dtype), rtol=TOLERANCE[dtype], atol=1e-5)
        monkeypatch.setattr("kernels.grouped.has_native_products", lambda *_: False)
        monkeypatch.setattr("kernels.grouped.BLOCK_WEIGHTS", 4 * 32 * 512)  # four rows' panels at a time


# ---------------------------------------------------------------------- products


def layers_of(
    forms: tuple[Form, Form], outputs: int, inputs: int
) -> list[tuple[Tensor, Callable[..., Tensor]]]:
    """Return a plain and a gated layer of two matrices: their weights, and a function `layer(x, bias)`."""
    both = [draw_groups(form, outputs, inputs) for form in forms]
    panels = torch.cat([packed(groups, form) for groups, form in zip(both, forms, strict=True)])
    weights = torch.cat([exact(groups, form) for groups, form in zip(both, forms, strict=True)])
    layout = Layout.of(inputs, (outputs, outputs), forms)
    return [
        (weights, lambda x, bias=None: grouped_linear(x, panels, layout, bias)),
        (weights, lambda x, bias=None: grouped_linear_reference(x, panels, layout, bias)),
        (weights, lambda x, bias=None: grouped_gated_linear(x, panels, layout, "silu", bias)),
    ]


def assert_near(found: Tensor, expected: Tensor) -> None:
    """A result may differ by rounding: of the sums, which grow with the weights, and of the result."""
    tolerance = TOLERANCE[found.dtype]
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@EVERY_FORM
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("inputs", [256, 768])
def test_products_are_those_of_float64(dtype: torch.dtype, form: Form, outputs: int, inputs: int) -> None:
    other = Form(5, mins=True)  # a layer may have matrices of two kinds
    (weights, linear), (_, reference), (_, gated_linear) = layers_of((form, other), outputs, inputs)
    bias = draw(2 * outputs, dtype=dtype, seed=1)
    for rows in (0, 1, 2, 9, 16, 17, 33, 130):
        x = draw(rows, 2 * inputs, dtype=dtype, seed=rows)[:, inputs:] / inputs  # rows with gaps between them
        y = x.double() @ weights.T
        for result in (linear(x), reference(x)):
            assert (result.dtype, result.shape) == (dtype, y.shape)
            if rows:
                assert_near(result, y)
        if rows:
            assert_near(linear(x, bias), y + bias.double())
            assert_near(gated_linear(x, bias), gated_act_reference(y + bias.double(), "silu"))


@pytest.mark.parametrize("blocks", [1, 7, 9, 18])
@pytest.mark.parametrize("form", [Form(4), Form(5, mins=True)], ids=str)
def test_any_number_of_blocks_is_multiplied(dtype: torch.dtype, form: Form, blocks: int) -> None:
    """Many rows meet some blocks at a time, and the last of these may be fewer."""
    inputs = 32 * blocks
    for weights, layer in layers_of((form, form), 75, inputs)[:2]:
        for rows in (1, 7, 40):
            x = draw(rows, inputs, dtype=dtype, seed=rows)
            assert_near(layer(x), x.double() @ weights.T)


@pytest.mark.usefixtures("native_kernels")
@EVERY_FORM
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, form: Form) -> None:
    inputs = 768
    for _, layer in (layers := layers_of((form, form), 75, inputs))[:1] + layers[2:]:
        x = draw(300, inputs, dtype=dtype)
        together = layer(x)
        for rows in (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 127, 128, 129, 257):
            for first in (0, 43):
                assert torch.equal(layer(x[first : first + rows]), together[first : first + rows])


def test_a_wide_layer_keeps_its_float32_sums() -> None:
    form = Form(6, blocks=8, groups=2)
    panels, layout = packed(draw_groups(form, 75, 512), form), Layout.of(512, (75,), (form,))
    x = draw(5, 512, dtype=BF16)
    wide = grouped_linear(x, panels, layout, wide=True)
    assert wide.dtype == FP32
    assert torch.equal(wide.bfloat16(), grouped_linear(x, panels, layout))
    assert_near(wide, x.double() @ unpack(panels, form, 512)[:75].double().T)
