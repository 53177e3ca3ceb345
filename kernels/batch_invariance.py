"""Measures on this machine whether a row's bits depend on the other rows of its batch.

Floating-point addition rounds, so a sum in another order may have other last bits. The C++ kernels fix the order of
their own sums. The sums inside a matrix product are a library's, and a library may choose their order by the number
of rows. oneDNN's bfloat16 products do: one row alone differs from the same row beside others in one output of some
thousands, and only if sums are long. cuBLAS may divide a sum among processors. So the loaded model's products are
tried, at their real sizes and on enough outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import attention
from kernels.attention_layout import AttentionLayout
from kernels.dispatch import has_native_products, use_triton

HOST = torch.device("cpu")

OUTPUTS = 100_000  # outputs of a product computed row by row: with fewer, a rare difference would be missed
COUNTS = (2, 3, 16, 17, 64)  # numbers of rows that are tried besides one and the largest
FEWEST_ROWS, MOST_ROWS = 32, 256  # bounds of the largest number of rows that is tried
MOST_WORK = 2**30  # multiplications of the largest trial: wider products are tried with fewer rows
# On a GPU. cuBLAS has other kernels for 200 rows than for 100, and trials take no time.
COUNTS_ON_GPU, MOST_ROWS_ON_GPU = (*COUNTS, 8, 32, 65, 100, 128, 200, 256, 512), 1024

COLUMNS = 600  # columns of the sequence that attention is tried on: several tiles of a kernel, and two splits
DECODED = 64  # number of last queries that are also computed one at a time
CHUNKS = (17, 100)  # numbers of last queries that are also computed as one chunk


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer.

    Attributes:
        inputs, outputs: K and N.
        compute: [T, K] -> [T, N].
    """

    inputs: int
    outputs: int
    compute: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of attention: query heads, KV heads, and the dimension of a head."""

    queries: int
    keys: int
    size: int


@torch.inference_mode()
def is_batch_invariant(
    products: Iterable[Product], heads: Heads, dtype: torch.dtype, device: torch.device = HOST
) -> bool:
    """Return whether, in trials, the kernels on this device give a token the same bits alone and in batches.

    Returns False without a trial if PyTorch computes the attention, or, on a CPU, products of type `dtype`.

    Args:
        products: the model's linear layers. Of several with equal sizes, the first is tried.
        heads: sizes of the model's attention.
        dtype: type of the weights and activations.
        device: where the model is.
    """
    nothing = torch.empty(0, dtype=dtype, device=device)
    if not (use_triton(nothing) or has_native_products(nothing)):
        return False
    distinct = {(product.inputs, product.outputs): product for product in reversed(list(products))}
    return attention_keeps_bits(heads, dtype, device) and all(
        product_keeps_bits(product, dtype, device) for product in distinct.values()
    )


def product_keeps_bits(product: Product, dtype: torch.dtype, device: torch.device = HOST) -> bool:
    """Return whether rows of a product have the same bits one by one, a few together, and all together."""
    work = product.inputs * product.outputs
    on_gpu = device.type == "cuda"
    most = MOST_ROWS_ON_GPU if on_gpu else max(min(MOST_ROWS, MOST_WORK // work), FEWEST_ROWS)
    counts = COUNTS_ON_GPU if on_gpu else COUNTS
    x = _draw(most, product.inputs, dtype=dtype, device=device)
    together = product.compute(x)
    singles = min(most, -(-OUTPUTS // product.outputs))
    pieces = [slice(row, row + 1) for row in range(singles)]
    # The last rows: among all rows, they are at other places of the product's tiles than alone.
    pieces += [slice(most - count, most) for count in counts if count < most]
    return all(torch.equal(product.compute(x[rows]), together[rows]) for rows in pieces)


def attention_keeps_bits(heads: Heads, dtype: torch.dtype, device: torch.device = HOST) -> bool:
    """Return whether tokens have the same bits decoded one by one, prefilled in chunks, and prefilled whole."""
    q = _draw(COLUMNS, heads.queries, heads.size, dtype=dtype, device=device)
    k, v = _draw(2, COLUMNS, heads.keys, heads.size, dtype=dtype, device=device)
    k_store, v_store = torch.zeros_like(k)[None], torch.zeros_like(v)[None]  # one block each
    scale = heads.size**-0.5

    def compute(first: int, end: int) -> Tensor:
        """Compute a pass of the queries `first` to `end`: [end - first, Hq, D]."""
        layout = AttentionLayout(
            torch.zeros(1, 1, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64),
            COLUMNS,
            (end - first,),
            (end,),
            heads.keys,
            device,
        )
        own = slice(first, end)
        return attention(q[own], k[own], v[own], k_store, v_store, layout, scale=scale, window=None)

    whole = compute(0, COLUMNS)
    pieces = [(row, row + 1) for row in range(COLUMNS - DECODED, COLUMNS)]
    pieces += [(COLUMNS - queries, COLUMNS) for queries in CHUNKS]
    return all(torch.equal(compute(first, end), whole[first:end]) for first, end in pieces)


def _draw(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
