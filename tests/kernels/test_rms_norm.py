"""RMSNorm in every implementation, against the formula in float64."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernels.rms_norm
from tests.kernels.support import BF16, DTYPES, FP16, FP32, ROWS, SIZES

EPS = 1e-5
#: All sizes in float32, in which offsets are added, and one size in each of the other types.
FORMS = pytest.mark.parametrize(
    ("size", "dtype", "offset"),
    [*((size, FP32, 1.0) for size in SIZES), (42, FP32, 0.0), (576, BF16, 1.0), (42, FP16, 0.0)],
    ids=str,
)


def make_rows(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Return rows with growing numbers: eps matters in the first, and is negligible in the last."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    rows = x[..., 0].numel()
    scales = torch.logspace(-2, 2, max(rows, 1))[:rows].reshape(*shape[:-1], 1)
    return (x * scales).to(device, dtype)


def make_weight(size: int, dtype: torch.dtype = FP32, device: str = "cpu") -> torch.Tensor:
    return (1 + 0.5 * torch.randn(size, generator=torch.Generator().manual_seed(1))).to(device, dtype)


def oracle(x: torch.Tensor, weight: torch.Tensor, offset: float = 0.0, eps: float = EPS) -> torch.Tensor:
    """Compute the formula row by row in float64."""
    rows = x.double().cpu().numpy()
    scale = weight.double().cpu().numpy() + offset
    result = np.empty_like(rows)
    for index in np.ndindex(rows.shape[:-1]):
        row = rows[index]
        result[index] = row / np.sqrt(np.dot(row, row) / len(row) + eps) * scale
    return torch.from_numpy(result).to(x.device)


def norm(way, x, weight, offset=0.0, eps=EPS):
    return way.of(kernels.rms_norm, "rms_norm")(x, weight, eps, offset)


def fused(way, x, residual, weight, offset=0.0):
    return way.of(kernels.rms_norm, "fused_add_rms_norm")(x, residual, weight, EPS, offset)


@FORMS
def test_a_row_is_divided_by_its_root_mean_square(way, dtype, offset, size):
    weight = make_weight(size, dtype, way.device)
    for rows in ROWS:
        x = make_rows(rows, size, dtype=dtype, device=way.device)
        result = norm(way, x, weight, offset)
        assert result.dtype == dtype
        way.assert_rounded(result, oracle(x, weight, offset))


@FORMS
def test_the_fused_kernel_adds_then_normalises(way, dtype, offset, size):
    weight = make_weight(size, dtype, way.device)
    for rows in ROWS:
        x = make_rows(rows, size, dtype=dtype, device=way.device)
        residual = make_rows(rows, size, device=way.device, seed=2)
        before = x.clone(), residual.clone()
        normed, total = fused(way, x, residual, weight, offset)
        assert normed.dtype == dtype
        assert torch.equal(total, x.float() + residual)
        way.assert_rounded(normed, oracle(total, weight, offset))
        assert all(map(torch.equal, (x, residual), before))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_heads_are_normalised_where_they_lie(way, dtype, head_dim):
    """Query and key norm: a [T, heads, D] view of a fused QKV matrix, not starting at its first column."""
    weight = make_weight(head_dim, dtype, way.device)
    for heads in (1, 3, 9):
        whole = make_rows(3, (heads + 3) * head_dim, dtype=dtype, device=way.device)
        x = whole[:, head_dim : -2 * head_dim].view(3, heads, head_dim)
        assert not x.is_contiguous()
        result = norm(way, x, weight, 1.0)
        assert result.is_contiguous()
        way.assert_rounded(result, oracle(x, weight, 1.0))


VIEWS = {
    "one row": lambda: make_rows(1, 96)[0],
    "four dimensions": lambda: make_rows(6, 4 * 96).view(2, 3, 4, 96).transpose(0, 2),
    "transposed heads": lambda: make_rows(5, 3 * 96).view(5, 3, 96).transpose(0, 1),
    "every second column": lambda: make_rows(5, 192)[:, ::2],
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_layout_gives_a_contiguous_result(way, view):
    x, weight = VIEWS[view]().to(way.device), make_weight(96, device=way.device)
    result = norm(way, x, weight)
    assert result.is_contiguous()
    way.assert_rounded(result, oracle(x, weight))


@pytest.mark.parametrize("step", [1, 2])
def test_the_fused_kernel_takes_rows_with_gaps(way, step):
    x = make_rows(5, 200, device=way.device)[:, : 96 * step : step]
    residual = make_rows(5, 300, device=way.device, seed=2)[:, 3 : 3 + 96 * step : step]
    weight = make_weight(96, device=way.device)
    normed, total = fused(way, x, residual, weight)
    assert normed.is_contiguous()
    assert total.is_contiguous()
    assert torch.equal(total, x + residual)
    way.assert_rounded(normed, oracle(total, weight))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 9),
    size=st.integers(1, 300),
    offset=st.sampled_from([0.0, 1.0, -0.25]),
    eps=st.sampled_from([1e-6, 1e-3, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_any_size_offset_and_eps_follow_the_formula(way, rows, size, offset, eps, seed):
    x, weight = make_rows(rows, size, device=way.device, seed=seed), make_weight(size, device=way.device)
    way.assert_rounded(norm(way, x, weight, offset, eps), oracle(x, weight, offset, eps))


def test_a_zero_row_stays_zero_and_a_nan_row_stays_alone(way):
    x = torch.ones(3, 96, device=way.device)
    x[0] = 0.0
    x[1, 5] = float("nan")
    result = norm(way, x, torch.ones(96, device=way.device))
    assert (result[0] == 0).all()
    assert result[1].isnan().all()
    assert torch.equal(result[2], norm(way, x[2:], torch.ones(96, device=way.device))[0])
