"""Tensors that do not fit together are refused by name, and empty ones give empty results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.draw import draw_triton
from kernels.gated_act import gated_act
from kernels.linear import pack_linear
from kernels.paged_attention import PagedIndices, paged_attention_triton
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.rope import rope

ones = torch.ones


def rotate(**changes: Any) -> None:
    arguments = {
        "q": ones(2, 3, 8),
        "k": ones(2, 1, 8),
        "cos": ones(9, 4),
        "sin": ones(9, 4),
        "positions": torch.zeros(2, dtype=torch.int64),
    }
    rope(**(arguments | changes))


def attend(
    *, q: Tensor | None = None, positions: int = 2, window: int | None = None, **stores: Tensor
) -> Tensor:
    indices = PagedIndices(
        torch.zeros(2, 2, dtype=torch.int32),
        torch.zeros(positions, dtype=torch.int64),
        torch.zeros(2, 3, dtype=torch.int32),
        0,
        0,
        1,
    )
    arguments = {"k_store": ones(3, 4, 2, 8), "v_store": ones(3, 4, 2, 8)} | stores
    q = ones(2, 4, 8) if q is None else q
    return paged_attention_triton(q, **arguments, indices=indices, scale=1.0, window=window)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(ones(2, 8), ones(7), 1e-6), r"weight must be \[8\]"),
        (
            lambda: fused_add_rms_norm(ones(2, 8), ones(3, 8), ones(8), 1e-6),
            "x and residual must have one shape",
        ),
        (lambda: gated_act(ones(2, 8), "relu"), "unknown activation 'relu'"),
        (lambda: gated_act(ones(2, 7), "silu"), "even number of columns"),
        (lambda: rotate(k=ones(3, 1, 8)), "must agree in tokens and head size"),
        (lambda: rotate(sin=ones(1, 4)), "half of q's head size 8"),
        (lambda: rotate(positions=None), "cos must have one row for each of q's 2 tokens, but has 9"),
        (lambda: attend(v_store=ones(3, 4, 2, 16)), "the last being q's head size"),
        (lambda: attend(q=ones(2, 3, 8)), "3 query heads cannot share 2 KV heads"),
        (lambda: attend(q=ones(2, 4, 8).half()), "must have one dtype"),
        (lambda: attend(k_store=ones(3, 2, 4, 8).transpose(1, 2)), "same strides"),
        (lambda: attend(positions=3), r"positions \[3\]"),
        (lambda: attend(window=0), "at least 1.*but is 0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_no_rows_give_no_results(triton_device: str) -> None:
    assert draw_triton(torch.zeros(0, 50, device=triton_device)).shape == (0,)


def test_a_matrix_of_an_odd_number_of_inputs_is_left_to_torch() -> None:
    assert pack_linear(ones(4, 5)) is None
