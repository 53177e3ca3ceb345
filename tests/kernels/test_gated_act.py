"""Gated activations: the reference against formulas in float64, the Triton kernel against the reference."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.gated_act import ACTIVATIONS, gated_act, gated_act_reference, gated_act_triton

# numpy, in the interpreter: powers and exponentials of a large gate are infinite, as they should be.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

SIZES = [1, 7, 96, 576, 1152, 2048]
ROWS = [0, 1, 3, 17]
DTYPES = [torch.float32, torch.bfloat16]


def make_gate_up(rows: int, size: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, 2 * size, generator=generator)).to(device, dtype)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {"silu": silu, "gelu_tanh": gelu_tanh}


def oracle(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """One number at a time, in Python's float64."""
    formula, size = FORMULAS[activation], gate_up.shape[1] // 2
    rows = gate_up.double().cpu().tolist()
    result = [[formula(row[i]) * row[size + i] for i in range(size)] for row in rows]
    return torch.tensor(result, dtype=torch.float64, device=gate_up.device)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_reference_is_the_formula(device, dtype, activation, size, assert_rounded):
    gate_up = make_gate_up(5, size, dtype, device)
    before = gate_up.clone()
    result = gated_act_reference(gate_up, activation)
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert_rounded(result, oracle(gate_up, activation), roundings=2)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_kernel_equals_reference(triton_device, dtype, activation, rows, size, assert_rounded):
    gate_up = make_gate_up(rows, size, dtype, triton_device)
    before = gate_up.clone()
    result = gated_act_triton(gate_up, activation)
    assert result.dtype == dtype
    assert_rounded(
        result, gated_act_reference(gate_up.float(), activation), interpreted=triton_device == "cpu"
    )
    assert torch.equal(gate_up, before)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 4),
    size=st.integers(1, 80),
    activation=st.sampled_from(ACTIVATIONS),
    seed=st.integers(0, 2**16),
)
def test_kernel_equals_formula_on_any_size(triton_device, assert_rounded, rows, size, activation, seed):
    gate_up = make_gate_up(rows, size, torch.float32, triton_device, seed)
    assert_rounded(
        gated_act_triton(gate_up, activation),
        oracle(gate_up, activation),
        interpreted=triton_device == "cpu",
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("step", [1, 2])
def test_rows_with_gaps(triton_device, activation, step, assert_rounded):
    wide = make_gate_up(3, 300, torch.float32, triton_device)
    gate_up = wide[:, 10 : 10 + 192 * step : step]
    for function in (gated_act_triton, gated_act_reference):
        result = function(gate_up, activation)
        assert result.is_contiguous()
        assert_rounded(result, oracle(gate_up, activation), roundings=2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_far_from_zero_are_open_or_shut(triton_device, activation):
    gates = torch.tensor([[1e4, 1e15, -1e4, -1e15]], device=triton_device)
    gate_up = torch.cat((gates, torch.full_like(gates, 2.0)), dim=1)
    expected = torch.tensor([[2e4, 2e15, 0.0, 0.0]], device=triton_device)
    for function in (gated_act_triton, gated_act_reference):
        torch.testing.assert_close(function(gate_up, activation), expected)


def test_row_offsets_beyond_32_bits(triton_device):
    """Row 2 of this view starts past element 2^31. Only the pages that are touched take memory on a CPU."""
    stride = 2**30 + 64
    try:
        store = torch.empty(2 * stride + 192, dtype=torch.bfloat16, device=triton_device)
    except RuntimeError:
        pytest.skip("4 GiB of address space are not to be had")
    small = make_gate_up(3, 96, torch.bfloat16, triton_device)
    gate_up = store.as_strided((3, 192), (stride, 1))
    gate_up.copy_(small)
    assert torch.equal(gated_act_triton(gate_up, "silu"), gated_act_triton(small, "silu"))


def test_unknown_activation_names_the_choices():
    with pytest.raises(ValueError, match=r"'relu'.*silu, gelu_tanh"):
        gated_act(torch.ones(1, 4), "relu")


def test_an_odd_number_of_columns_has_no_halves():
    with pytest.raises(ValueError, match=r"even number of columns.*\[1, 5\]"):
        gated_act(torch.ones(1, 5), "silu")
