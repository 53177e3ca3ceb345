"""Norms, rotation and writing of a layer's heads in one Triton launch, compared with torch."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.rope import HeadNorms, norm_rope_write_reference, norm_rope_write_triton
from tests.kernels.support import BF16, FP16, FP32, HALF_ULP, draw

SIZES = [(1, 1, 1, 64), (3, 8, 2, 128), (17, 4, 1, 256), (5, 3, 3, 80), (2, 9, 3, 16)]  # tokens, heads, size
STORE = 7, 5  # blocks, columns


@pytest.mark.parametrize(
    ("sizes", "offset", "dtype"),
    [
        *((sizes, 1.0, FP32) for sizes in SIZES),
        *((SIZES[3], offset, dtype) for offset in (None, 0.0) for dtype in (FP32, BF16)),  # None: no norms
        (SIZES[-1], 0.0, FP16),
    ],
    ids=str,
)
def test_one_launch_norms_rotates_and_writes(
    triton_device: str, sizes: tuple[int, int, int, int], offset: float | None, dtype: torch.dtype
) -> None:
    tokens, heads_q, heads_kv, size = sizes
    # A view of a wider matrix, because heads are read in place.
    heads = draw(tokens, heads_q + 2 * heads_kv + 1, size, dtype=dtype, device=triton_device)[:, :-1]
    norms = None
    if offset is not None:
        weights = (draw(size, dtype=dtype, device=triton_device, seed=seed) for seed in (1, 2))
        norms = HeadNorms(*weights, 1e-5, offset)
    angles = draw(tokens, size // 2, device=triton_device, seed=3)
    rows = torch.randperm(math.prod(STORE), generator=torch.Generator().manual_seed(4))
    addresses = rows[:tokens].to(triton_device)
    results = []
    for function in (norm_rope_write_triton, norm_rope_write_reference):
        stores = [
            torch.full((*STORE, heads_kv, size), math.nan, dtype=dtype, device=triton_device)
            for _ in range(2)
        ]
        before = heads.clone()
        q = function(heads, norms, angles.cos(), angles.sin(), *stores, addresses)
        assert torch.equal(heads, before)
        assert q.shape == (tokens, heads_q, size)
        results.append((q, *stores))
    # Norm and rotation both round, and the interpreter cuts bits off instead of rounding to bfloat16.
    tolerance = (1 if offset is None else 3) * 2 * HALF_ULP[dtype]
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual.isnan(), expected.isnan()), "rows of others are not written"
        torch.testing.assert_close(
            actual.float(), expected.float(), rtol=tolerance, atol=8 * tolerance, equal_nan=True
        )
    written = [store.view(-1, heads_kv, size)[addresses] for store in results[0][1:]]
    assert torch.equal(written[1], heads[:, -heads_kv:])
