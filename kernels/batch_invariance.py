"""Whether a row's bits depend on what is computed beside it: found out on this machine, once a model is loaded.

Floating-point addition rounds, so a sum in another order may have other last bits. The C++ kernels fix the order of
their own sums. What adds up inside a matrix product is the machine's library, and a library may choose its way by
the number of rows. oneDNN's bfloat16 products were seen to: one row alone differs from the same row beside others
in one output of some thousands, and only where sums are long. So the products are tried: those of the model at
hand, at their real sizes, on enough outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import native_attention
from kernels.attention_layout import AttentionLayout
from kernels.dispatch import has_native_products

OUTPUTS = 100_000  # of a product, one row at a time: with fewer, a rare difference would be missed
COUNTS = (2, 3, 16, 17, 64)  # rows that it is given besides one and the most
FEWEST_ROWS, MOST_ROWS = 32, 256  # that it is given at the most
MOST_WORK = 2**30  # multiplications of one product with so many rows: the wider it is, the fewer

COLUMNS = 300  # of the sequence that attention is tried on: more than one tile of the kernel
DECODED = 64  # of its queries, the last ones, are also computed one at a time
CHUNKS = (17, 100)  # queries of its end that are computed together


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
    """Sizes of attention: query heads, heads of keys and values, numbers in a head."""

    queries: int
    keys: int
    size: int


@torch.inference_mode()
def is_batch_invariant(products: Iterable[Product], heads: Heads, dtype: torch.dtype) -> bool:
    """Whether a pass of native kernels gives a token the same bits alone and beside any others, on this CPU.

    False, too, where the kernels do not compute the products of this type: nobody vouches for another library's.

    Args:
        products: the model's. Of those that are alike in size, the first is tried.
        heads: of its attention.
        dtype: of its weights and activations.
    """
    if not has_native_products(torch.empty(0, dtype=dtype)):
        return False
    distinct = {(product.inputs, product.outputs): product for product in reversed(list(products))}
    return attention_keeps_bits(heads, dtype) and all(
        product_keeps_bits(product, dtype) for product in distinct.values()
    )


def product_keeps_bits(product: Product, dtype: torch.dtype) -> bool:
    """Whether rows of a product have the same bits one by one, a few together, and all together."""
    work = product.inputs * product.outputs
    most = max(min(MOST_ROWS, MOST_WORK // work), FEWEST_ROWS)
    x = _draw(most, product.inputs, dtype=dtype)
    together = product.compute(x)
    singles = min(most, -(-OUTPUTS // product.outputs))
    pieces = [slice(row, row + 1) for row in range(singles)]
    # The last rows: beside others they lie elsewhere in whatever the product is cut into.
    pieces += [slice(most - count, most) for count in COUNTS if count < most]
    return all(torch.equal(product.compute(x[rows]), together[rows]) for rows in pieces)


def attention_keeps_bits(heads: Heads, dtype: torch.dtype) -> bool:
    """Whether tokens have the same bits decoded one by one, prefilled in chunks, and prefilled whole."""
    q = _draw(COLUMNS, heads.queries, heads.size, dtype=dtype)
    k, v = _draw(2, COLUMNS, heads.keys, heads.size, dtype=dtype)
    k_store, v_store = torch.zeros(2, 1, COLUMNS, heads.keys, heads.size, dtype=dtype)  # one block each
    scale = heads.size**-0.5

    def compute(first: int, end: int) -> Tensor:
        """What queries `first` to `end` give, [end - first, Hq, D], where those are a pass's."""
        layout = AttentionLayout(
            torch.zeros(1, 1, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64),
            COLUMNS,
            (end - first,),
            (end,),
            heads.keys,
        )
        own = slice(first, end)
        return native_attention(q[own], k[own], v[own], k_store, v_store, layout, scale=scale, window=None)

    whole = compute(0, COLUMNS)
    pieces = [(row, row + 1) for row in range(COLUMNS - DECODED, COLUMNS)]
    pieces += [(COLUMNS - queries, COLUMNS) for queries in CHUNKS]
    return all(torch.equal(compute(first, end), whole[first:end]) for first, end in pieces)


def _draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
