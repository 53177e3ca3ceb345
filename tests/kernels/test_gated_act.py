"""Gated activations in every implementation, against the formulas in float64."""

import numpy as np
import pytest
import torch

import kernels.gated_act
from kernels.gated_act import ACTIVATIONS
from tests.kernels.support import DTYPES, FP32, ROWS, SIZES, draw

# numpy, in the interpreter: powers and exponentials of a large gate are infinite, as they should be.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

EVERY_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def oracle(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = np.split(gate_up.double().cpu().numpy(), 2, axis=1)
    return torch.from_numpy(FORMULAS[activation](gate) * up).to(gate_up.device)


def gated(way, gate_up, activation):
    return way.of(kernels.gated_act, "gated_act")(gate_up, activation)


@EVERY_ACTIVATION
@pytest.mark.parametrize(
    ("size", "dtype"), [*((size, FP32) for size in SIZES), *((42, dtype) for dtype in DTYPES[1:])], ids=str
)
def test_the_formula_is_followed(way, dtype, activation, size):
    for rows in ROWS:
        gate_up = draw(rows, 2 * size, dtype=dtype, device=way.device)
        before = gate_up.clone()
        result = gated(way, gate_up, activation)
        assert result.dtype == dtype
        assert result.is_contiguous()
        # The reference rounds the activation before it multiplies.
        way.assert_rounded(result, oracle(gate_up, activation), roundings=2 if way.name == "reference" else 1)
        assert torch.equal(gate_up, before)


@EVERY_ACTIVATION
@pytest.mark.parametrize("step", [1, 2])
def test_rows_with_gaps(way, activation, step):
    gate_up = draw(3, 400, device=way.device)[:, 10 : 10 + 192 * step : step]
    result = gated(way, gate_up, activation)
    assert result.is_contiguous()
    way.assert_rounded(result, oracle(gate_up, activation), roundings=2)


@EVERY_ACTIVATION
def test_gates_far_from_zero_are_open_or_shut_and_nan_stays(way, activation):
    gates = [1e4, 1e15, -1e4, -1e15, 88.0, -88.0, -103.0, torch.inf, torch.nan, -0.0, 1e-30]
    gate_up = torch.tensor([[*gates, *[2.0] * len(gates)]], device=way.device)
    expected = oracle(gate_up, activation).float()
    torch.testing.assert_close(
        gated(way, gate_up, activation), expected, equal_nan=True, atol=1e-35, rtol=1e-5
    )
