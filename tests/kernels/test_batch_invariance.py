"""The measurement of batch invariance at start: the kernels pass it here, and kernels that break the rule fail."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import batch_invariance
from kernels.batch_invariance import Heads, Product, attention_keeps_bits, is_batch_invariant
from kernels.batch_invariance import product_keeps_bits as keeps_bits
from kernels.linear import pack_linear, packed_linear

SIZES = [(512, 512), (1792, 512), (576, 960), (144, 320), (512, 32_000)]  # inputs, outputs
HEADS = Heads(queries=8, keys=4, size=64)


def weights(inputs: int, outputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)


def product_of(weight: Tensor) -> Product:
    packed = pack_linear(weight)
    assert packed is not None
    outputs, inputs = weight.shape
    return Product(inputs, outputs, functools.partial(packed_linear, packed=packed, outputs=outputs))


def product(inputs: int, outputs: int, dtype: torch.dtype) -> Product:
    return product_of(weights(inputs, outputs, dtype))


def test_native_kernels_are_batch_invariant(dtype: torch.dtype, threads: int) -> None:
    """This test has passed on every processor so far. If it fails, the processor is different or a kernel is
    broken. Servers then say so at /version, and tests that compare bits are skipped or compare within bounds."""
    sizes = SIZES if threads == 1 else SIZES[1:2]
    assert is_batch_invariant([product(*size, dtype) for size in sizes], HEADS, dtype)


# ---------------------------------------------------------------------- products that break the rule


class Flipped:
    """A product with errors: in calls that `where` chooses, the last bit of one in `one_in` outputs is flipped."""

    def __init__(self, product: Product, one_in: int, where: Callable[[int], bool]) -> None:
        self.product, self.one_in, self.where = product, one_in, where
        self.computed = 0

    def __call__(self, x: Tensor) -> Tensor:
        y = self.product.compute(x)
        if self.where(x.shape[0]):
            first = -self.computed % self.one_in
            self.computed += y.numel()
            bits = torch.int32 if y.dtype == torch.float32 else torch.int16
            y.view(-1).view(bits)[first :: self.one_in] ^= 1
        return y


@pytest.mark.parametrize(
    ("size", "one_in", "rows"),
    [
        *(((576, 960), 10_000 if rows == 1 else 3000, rows) for rows in (1, 2, 3, 16, 17, 64, 256)),
        *((size, 10_000, 1) for size in SIZES),
        *((size, 3000, 256) for size in (SIZES[1], SIZES[-1])),
    ],
)
def test_rare_differences_are_seen(dtype: torch.dtype, size: tuple[int, int], one_in: int, rows: int) -> None:
    """For one row, differences are even rarer than in oneDNN's products: 1 in 8,000 outputs at 1536 inputs."""
    sound = product(*size, dtype)
    seen: list[int] = []

    def where(count: int) -> bool:
        seen.append(count)
        return count == rows

    flipped = Flipped(sound, min(one_in, rows * sound.outputs), where)
    verdict = keeps_bits(dataclasses.replace(sound, compute=flipped), dtype)
    assert verdict is (rows not in seen)
    assert rows in seen or (rows, size) == (256, (512, 32_000)), "a wide product gets fewer rows"


@pytest.mark.parametrize("queries", [1, 17, 100])
def test_attention_that_depends_on_a_chunk_is_seen(
    dtype: torch.dtype, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = batch_invariance.attention

    def attention(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = original(q, *args, **kwargs)
        if q.shape[0] == queries:
            out[-1, -1, -1] *= 1 + 2.0**-7
        return out

    assert attention_keeps_bits(HEADS, dtype)
    monkeypatch.setattr(batch_invariance, "attention", attention)
    assert not attention_keeps_bits(HEADS, dtype)
