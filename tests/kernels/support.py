"""Implementations of kernels, bounds on rounding, and stores of keys and values for attention."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention_layout import AttentionLayout

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [FP32, BF16, FP16]
SIZES = [1, 7, 16, 42, 576, 2048]
ROWS = [0, 1, 17]
HEAD_SIZES = [2, 80, 128]
SCALE = 0.3  # of attention scores

# The relative error of one rounding to nearest: half a unit in the last place. In float32 the value bounds the
# error of the arithmetic instead, of sums of a few thousand squares.
HALF_ULP = {FP32: 2e-6, BF16: 2**-8, FP16: 2**-11}


@dataclass(frozen=True)
class Way:
    """An implementation of the kernels, by the last word of its functions' names, and the device it runs on."""

    name: str
    device: str

    @property
    def interpreted(self) -> bool:
        """True for Triton's interpreter, which converts float32 to bfloat16 by cutting bits off."""
        return self.name == "triton" and self.device == "cpu"

    def of(self, module: ModuleType, kernel: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(module, f"{kernel}_{self.name}")
        return function

    def assert_rounded(self, actual: Tensor, exact: Tensor, *, roundings: int = 1) -> None:
        """Assert that `actual` is `exact` (in float32 or more) after `roundings` roundings to nearest."""
        assert actual.shape == exact.shape
        assert exact.dtype in (torch.float32, torch.float64)
        tolerance = (roundings + self.interpreted) * HALF_ULP[actual.dtype] * 1.01
        torch.testing.assert_close(actual.double(), exact.double(), rtol=tolerance, atol=2e-6)

    def __str__(self) -> str:
        return f"{self.name}-{self.device}"


ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
WAYS = [
    pytest.param(Way(name, device), marks=pytest.mark.gpu if device == "cuda" else (), id=f"{name}-{device}")
    for name, device in (
        ("reference", "cpu"),
        ("native", "cpu"),
        ("triton", "cpu"),
        ("reference", "cuda"),
        ("triton", "cuda"),
    )
]


def draw(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu", seed: int = 0) -> Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


FAR = 2**30 + 64


def far_apart(count: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return memory for three pieces of `count` elements at a stride of FAR. The third begins past element 2^31.

    On a CPU only the pages that are used take memory.
    """
    try:
        return torch.empty(2 * FAR + count, dtype=dtype, device=device)
    except RuntimeError:
        pytest.skip("gigabytes of address space are not to be had")


# ---------------------------------------------------------------------- attention


@dataclass
class Store:
    """Sequences whose blocks lie anywhere, in a store in which every row that no query may see is poisoned."""

    q: Tensor  # [T, Hq, D]
    k: Tensor  # [blocks, block_size, Hkv, D]
    v: Tensor
    table: Tensor  # [S, N]
    queries: tuple[int, ...]  # numbers of queries; a sequence's queries are at its last columns
    lengths: tuple[int, ...]
    columns: list[tuple[np.ndarray, np.ndarray]]  # each sequence's own keys and values, [columns, Hkv, D]

    @classmethod
    def of(
        cls,
        sequences: Sequence[tuple[int, int]],
        block_size: int,
        heads: tuple[int, int] = (4, 2),
        *,
        head_dim: int = 8,
        window: int | None = None,
        dtype: torch.dtype = FP32,
        device: str = "cpu",
        poison: float = math.nan,
        seed: int = 0,
    ) -> Store:
        """Draw sequences of (queries, columns in all). A window hides columns in front of all queries."""
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // block_size) for _, length in sequences]
        total = sum(counts) + 3
        nobodys, *free = random.Random(seed).sample(range(total), total)
        table = torch.full((len(sequences), max(counts, default=0) + 1), nobodys)
        shape = (total, block_size, heads[1], head_dim)
        k, v = (torch.full(shape, poison, dtype=dtype) for _ in range(2))
        columns = []
        for row, (queries, length) in enumerate(sequences):
            keys, values = (
                torch.randn(length, heads[1], head_dim, generator=generator).to(dtype) for _ in range(2)
            )
            for i in range(counts[row]):
                table[row, i] = free.pop()
            for column in range(0 if window is None else max(0, length - queries - window + 1), length):
                place = table[row, column // block_size], column % block_size
                k[place], v[place] = keys[column], values[column]
            columns.append((keys.double().numpy(), values.double().numpy()))
        return cls(
            q=torch.randn(sum(n for n, _ in sequences), heads[0], head_dim, generator=generator).to(
                device, dtype
            ),
            k=k.to(device),
            v=v.to(device),
            table=table.to(device),
            queries=tuple(n for n, _ in sequences),
            lengths=tuple(length for _, length in sequences),
            columns=columns,
        )

    @functools.cached_property
    def layout(self) -> AttentionLayout:
        return AttentionLayout(
            self.table.cpu(),
            torch.arange(len(self.table)),
            self.k.shape[1],
            self.queries,
            self.lengths,
            self.k.shape[2],
            self.q.device,
        )

    def oracle(self, window: int | None) -> Tensor:
        """Return attention in float64, [T, Hq, D], computed for each query and head over its visible columns."""
        q = self.q.double().cpu().numpy()
        out = np.zeros(q.shape)
        group = q.shape[1] // self.k.shape[2]
        token = 0
        for queries, (keys, values) in zip(self.queries, self.columns, strict=True):
            for position in range(len(keys) - queries, len(keys)):
                seen = [
                    c for c in range(len(keys)) if c <= position and (window is None or position - c < window)
                ]
                for head in range(q.shape[1] if seen else 0):
                    scores = keys[seen, head // group] @ q[token, head] * SCALE
                    weights = np.exp(scores - scores.max())
                    out[token, head] = weights @ values[seen, head // group] / weights.sum()
                token += 1
        return torch.from_numpy(out)
