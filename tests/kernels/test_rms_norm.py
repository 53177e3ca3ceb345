"""RMSNorm: the reference against float64, the Triton kernel against the reference."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.rms_norm import (
    fused_add_rms_norm,
    fused_add_rms_norm_reference,
    fused_add_rms_norm_triton,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)

EPS = 1e-5
HIDDEN_SIZES = [1, 7, 96, 576, 1152, 2048]
ROWS = [0, 1, 3, 17]
DTYPES = [torch.float32, torch.bfloat16]


def make_rows(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Rows from small to large: eps matters in the first, and would be lost in the last."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    rows = x[..., 0].numel()
    scales = torch.logspace(-2, 2, max(rows, 1))[:rows].reshape(*shape[:-1], 1)
    return (x * scales).to(device, dtype)


def make_weight(hidden_size: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (1 + 0.5 * torch.randn(hidden_size, generator=generator)).to(device, dtype)


def oracle(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """The formula, row by row in float64, sharing no code with what it checks."""
    rows = x.double().cpu().numpy()
    scale = weight.double().cpu().numpy() + offset
    result = np.empty_like(rows)
    for index in np.ndindex(rows.shape[:-1]):
        row = rows[index]
        root_mean_square = np.sqrt(np.dot(row, row) / len(row) + eps)
        result[index] = row / root_mean_square * scale
    return torch.from_numpy(result).to(x.device)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_reference_is_the_formula(device, dtype, offset, hidden_size, assert_rounded):
    x = make_rows(17, hidden_size, dtype=dtype, device=device)
    weight = make_weight(hidden_size, dtype, device)
    result = rms_norm_reference(x, weight, EPS, offset)
    assert result.dtype == dtype
    assert_rounded(result, oracle(x, weight, EPS, offset))


def test_reference_takes_float32_weights_with_bfloat16_rows(device, assert_rounded):
    x = make_rows(17, 96, dtype=torch.bfloat16, device=device)
    weight = make_weight(96, torch.float32, device)
    result = rms_norm_reference(x, weight, EPS)
    assert result.dtype == torch.bfloat16
    assert_rounded(result, oracle(x, weight, EPS, 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_kernel_equals_reference(triton_device, dtype, offset, rows, hidden_size, assert_rounded):
    x = make_rows(rows, hidden_size, dtype=dtype, device=triton_device)
    weight = make_weight(hidden_size, dtype, triton_device)
    result = rms_norm_triton(x, weight, EPS, offset)
    assert result.dtype == dtype
    exact = rms_norm_reference(x.float(), weight.float(), EPS, offset)
    assert_rounded(result, exact, interpreted=triton_device == "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 9])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_heads_are_normalised_where_they_lie(triton_device, dtype, heads, head_dim, assert_rounded):
    """Query and key norm: a [T, heads, D] view of a fused QKV matrix, not starting at its first column."""
    tokens, before, after = 3, head_dim, 2 * head_dim
    fused = make_rows(tokens, before + heads * head_dim + after, dtype=dtype, device=triton_device)
    x = fused[:, before:-after].view(tokens, heads, head_dim)
    assert not x.is_contiguous()
    weight = make_weight(head_dim, dtype, triton_device)
    exact = oracle(x, weight, EPS, 1.0)
    for function, interpreted in ((rms_norm_triton, triton_device == "cpu"), (rms_norm_reference, False)):
        result = function(x, weight, EPS, 1.0)
        assert result.is_contiguous()
        assert_rounded(result, exact, interpreted=interpreted)


@pytest.mark.parametrize("view", ["one row", "four dimensions", "transposed heads", "every second column"])
def test_any_layout_gives_a_contiguous_result(triton_device, view, assert_rounded):
    x = {
        "one row": make_rows(1, 96, dtype=torch.float32)[0],
        "four dimensions": make_rows(2 * 3, 4 * 96, dtype=torch.float32).view(2, 3, 4, 96).transpose(0, 2),
        "transposed heads": make_rows(5, 3 * 96, dtype=torch.float32).view(5, 3, 96).transpose(0, 1),
        "every second column": make_rows(5, 192, dtype=torch.float32)[:, ::2],
    }[view].to(triton_device)
    weight = make_weight(96, torch.float32, triton_device)
    for function in (rms_norm_triton, rms_norm_reference):
        result = function(x, weight, EPS)
        assert result.is_contiguous()
        assert_rounded(result, oracle(x, weight, EPS, 0.0), interpreted=function is rms_norm_triton)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 9),
    hidden_size=st.integers(1, 300),
    offset=st.sampled_from([0.0, 1.0, -0.25]),
    eps=st.sampled_from([1e-6, 1e-3, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_kernel_equals_formula_on_any_size(
    triton_device, assert_rounded, rows, hidden_size, offset, eps, seed
):
    x = make_rows(rows, hidden_size, dtype=torch.float32, device=triton_device, seed=seed)
    weight = make_weight(hidden_size, torch.float32, triton_device)
    result = rms_norm_triton(x, weight, eps, offset)
    assert_rounded(result, oracle(x, weight, eps, offset), interpreted=triton_device == "cpu")


def test_a_zero_row_stays_zero_and_a_nan_row_stays_alone(triton_device):
    x = torch.ones(3, 96, device=triton_device)
    x[0] = 0.0
    x[1, 5] = float("nan")
    weight = torch.ones(96, device=triton_device)
    for function in (rms_norm_triton, rms_norm_reference):
        result = function(x, weight, EPS)
        assert (result[0] == 0).all()
        assert result[1].isnan().all()
        assert result[2].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_fused_kernel_adds_then_normalises(triton_device, dtype, offset, rows, hidden_size, assert_rounded):
    x = make_rows(rows, hidden_size, dtype=dtype, device=triton_device)
    residual = make_rows(rows, hidden_size, dtype=dtype, device=triton_device, seed=2)
    weight = make_weight(hidden_size, dtype, triton_device)
    inputs_before = x.clone(), residual.clone()

    normed, new_residual = fused_add_rms_norm_triton(x, residual, weight, EPS, offset)

    interpreted = triton_device == "cpu"
    assert normed.dtype == new_residual.dtype == dtype
    assert_rounded(new_residual, x.double() + residual.double(), interpreted=interpreted)
    # Not the exact sum: what is normalised is the sum as it was stored.
    assert_rounded(normed, oracle(new_residual, weight, EPS, offset), interpreted=interpreted)
    assert torch.equal(x, inputs_before[0])
    assert torch.equal(residual, inputs_before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_reference_adds_then_normalises(device, dtype, assert_rounded):
    x = make_rows(17, 96, dtype=dtype, device=device)
    residual = make_rows(17, 96, dtype=dtype, device=device, seed=2)
    weight = make_weight(96, dtype, device)
    inputs_before = x.clone(), residual.clone()
    normed, new_residual = fused_add_rms_norm_reference(x, residual, weight, EPS, 1.0)
    assert torch.equal(new_residual, (x.double() + residual.double()).to(dtype))
    assert_rounded(normed, oracle(new_residual, weight, EPS, 1.0))
    assert torch.equal(x, inputs_before[0])
    assert torch.equal(residual, inputs_before[1])


@pytest.mark.parametrize("step", [1, 2])
def test_fused_takes_rows_with_gaps(triton_device, step, assert_rounded):
    x = make_rows(5, 200, dtype=torch.float32, device=triton_device)[:, : 96 * step : step]
    residual = make_rows(5, 300, dtype=torch.float32, device=triton_device, seed=2)[
        :, 3 : 3 + 96 * step : step
    ]
    weight = make_weight(96, torch.float32, triton_device)
    for function in (fused_add_rms_norm_triton, fused_add_rms_norm_reference):
        normed, new_residual = function(x, residual, weight, EPS)
        assert normed.is_contiguous()
        assert new_residual.is_contiguous()
        assert torch.equal(new_residual, x + residual)
        assert_rounded(normed, oracle(new_residual, weight, EPS, 0.0), interpreted=True)


def test_row_offsets_beyond_32_bits(triton_device, assert_rounded):
    """Row 2 of this view starts past element 2^31. Only the pages that are touched take memory on a CPU."""
    stride = 2**30 + 64
    try:
        store = torch.empty(2 * stride + 96, dtype=torch.bfloat16, device=triton_device)
    except RuntimeError:
        pytest.skip("4 GiB of address space are not to be had")
    x = store.as_strided((3, 96), (stride, 1))
    x.copy_(make_rows(3, 96, dtype=torch.bfloat16))
    weight = make_weight(96, torch.bfloat16, triton_device)
    result = rms_norm_triton(x, weight, EPS)
    assert_rounded(result, oracle(x, weight, EPS, 0.0), interpreted=triton_device == "cpu")
    normed, _ = fused_add_rms_norm_triton(x, torch.zeros_like(result), weight, EPS)
    assert torch.equal(normed, result)


def test_shapes_that_do_not_fit_are_named():
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"weight must be \[8\].*\[1\]"):
        rms_norm(x, torch.ones(1), EPS)
    with pytest.raises(ValueError, match=r"weight must be \[8\].*\[4\]"):
        fused_add_rms_norm(x, x, torch.ones(4), EPS)
    with pytest.raises(ValueError, match=r"\[2, 8\] and \[1, 8\]"):
        fused_add_rms_norm(x, x[:1], torch.ones(8), EPS)
