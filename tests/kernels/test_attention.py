"""Attention by the position rule, compared with an oracle in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels.attention
from kernels import attention_layout
from kernels.attention import attention, gathered_attention
from tests.kernels.support import SCALE, Store

WINDOWS = (None, 1, 2, 5, 16, 1000)

# Per sequence (queries, columns in all): the queries are the last of the columns.
PASSES: dict[str, list[tuple[int, int]]] = {
    "one prompt": [(7, 7)],
    "one token": [(1, 1)],
    "square": [(6, 6), (6, 6), (6, 6)],
    "prompts of many lengths": [(3, 3), (11, 11), (2, 2), (20, 20)],
    "rectangular": [(4, 9), (4, 17), (4, 4)],
    "decode": [(1, 5), (1, 5), (1, 5)],
    "decode at different places": [(1, 1), (1, 23), (1, 8), (1, 16), (1, 17)],
    "decode, then chunks and prompts": [(1, 9), (1, 30), (5, 12), (8, 8), (16, 33)],
    "single queries after longer ones": [(1, 4), (3, 8), (1, 12), (2, 2), (1, 1)],
    "no decode first": [(5, 8), (1, 6)],
}
HEADS = [(3, 3), (6, 2), (4, 1), (1, 1)]


def attend(store: Store, window: int | None) -> Tensor:
    """Call `attention` with the implementation that it chooses, on a store without the pass's keys and values.

    Block tables are not in the order of the sequences.
    """
    tables, rows = store.layout.block_tables.flip(0), store.layout.rows.flip(0)
    layout = dataclasses.replace(store.layout, block_tables=tables, rows=rows)
    own = layout.write_addresses
    new = [each.flatten(0, 1)[own] for each in (store.k, store.v)]
    for each in (store.k, store.v):
        each.flatten(0, 1)[own] = math.nan
    return attention(store.q, *new, store.k, store.v, layout, scale=SCALE, window=window)


def gathered(store: Store, window: int | None) -> Tensor:
    return gathered_attention(store.q, store.k, store.v, store.layout, scale=SCALE, window=window)


def assert_follows_the_rule(
    store: Store, window: int | None, out: Tensor | None = None, tolerance: float = 1e-5
) -> None:
    """Assert that `out`, or what the gathering path computes, is the oracle's."""
    out = gathered(store, window) if out is None else out
    assert out.dtype == store.q.dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out.double().cpu(), store.oracle(window), rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------- the rule


MIXED = "decode, then chunks and prompts"
FORMS: list[tuple[str, dict[str, Any], tuple[int | None, ...]]] = [
    *((name, {"block_size": 3}, WINDOWS) for name in PASSES),
    # Block sizes from one column to a whole sequence.
    *((MIXED, {"block_size": size}, (None, 5)) for size in (1, 16, 33, 64)),
    *((MIXED, {"block_size": 3, "heads": heads}, (None, 4)) for heads in HEADS),
    (MIXED, {"block_size": 3, "dtype": torch.bfloat16}, (None, 5)),
    ("decode at different places", {"block_size": 3, "dtype": torch.bfloat16}, (None, 5)),
]


@pytest.mark.parametrize(("name", "form", "windows"), FORMS, ids=str)
def test_every_query_sees_what_the_rule_shows_it(
    name: str, form: dict[str, Any], windows: tuple[int | None, ...], device: str
) -> None:
    for window in windows:
        store = Store.of(PASSES[name], **form, device=device)
        assert_follows_the_rule(store, window, tolerance=2e-2 if "dtype" in form else 1e-5)


@st.composite
def passes(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Draw a few sequences: numbers of queries, and of columns in all."""
    lengths = st.tuples(st.integers(1, 6) | st.just(1), st.integers(0, 12))
    return [
        (queries, before + queries) for queries, before in draw(st.lists(lengths, min_size=1, max_size=5))
    ]


@settings(max_examples=60)
@given(
    sequences=passes(),
    block_size=st.integers(1, 9),
    window=st.none() | st.integers(1, 14),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    seed=st.integers(0, 1000),
)
def test_any_pass_follows_the_rule(
    sequences: list[tuple[int, int]], block_size: int, window: int | None, heads: tuple[int, int], seed: int
) -> None:
    assert_follows_the_rule(Store.of(sequences, block_size, heads, seed=seed), window)


@pytest.mark.parametrize("window", [None, 5])
def test_a_neighbour_of_nan_keeps_its_exact_numbers(window: int | None) -> None:
    healthy = Store.of(PASSES[MIXED], block_size=3)
    expected = gathered(healthy, window)
    starts = np.cumsum([0, *healthy.layout.query_lengths])
    for sick in range(5):
        store = Store.of(PASSES[MIXED], block_size=3)
        blocks = -(-store.layout.kv_lengths[sick] // 3)
        for tensor in (store.k, store.v):
            tensor[store.layout.block_table[sick, :blocks]] = math.nan
        out = gathered(store, window)
        own = slice(starts[sick], starts[sick + 1])
        assert out[own].isnan().all()
        others = torch.ones(len(out), dtype=torch.bool)
        others[own] = False
        assert torch.equal(out[others], expected[others])


# ---------------------------------------------------------------------- the native kernel


@pytest.mark.parametrize("head_dim", [8, 32])  # few rows of 32 numbers have loops of their own
@pytest.mark.parametrize("name", PASSES)
def test_the_native_kernel_follows_the_rule(name: str, head_dim: int, dtype: torch.dtype) -> None:
    for window in (None, 1, 5):
        store = Store.of(PASSES[name], block_size=3, head_dim=head_dim, dtype=dtype)
        out = attend(store, window)
        assert_follows_the_rule(store, window, out, tolerance=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("head_dim", [8, 32])
def test_the_native_kernel_merges_tiles_of_columns(head_dim: int, dtype: torch.dtype) -> None:
    """A tile's largest score may be far from the others'. Two threads divide the tiles of the longest sequence."""
    for window in (None, 300):
        store = Store.of([(1, 1300), (3, 513), (40, 530)], 16, (2, 1), head_dim=head_dim, dtype=dtype)
        store.q *= 4
        out = attend(store, window)
        assert_follows_the_rule(store, window, out, tolerance=1e-5 if dtype == torch.float32 else 2e-2)


# ---------------------------------------------------------------------- the paged kernel


@pytest.mark.usefixtures("torch_kernels")
def test_without_native_kernels_a_cpu_gathers() -> None:
    store = Store.of(PASSES[MIXED], block_size=3)
    for window in (None, 5):
        assert torch.equal(attend(store, window), gathered(store, window))


@pytest.fixture
def paged_calls(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Choose Triton, interpreted if there is no GPU, and record the arguments of the paged kernel."""
    calls: list[tuple[Any, ...]] = []
    launch = kernels.attention.paged_attention_triton

    def recording(*arguments: Any, **options: Any) -> Tensor:
        calls.append(arguments)
        return launch(*arguments, **options)

    monkeypatch.setattr(kernels.attention, "use_triton", lambda tensor: True)
    monkeypatch.setattr(kernels.attention, "paged_attention_triton", recording)
    return calls


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", PASSES)
def test_one_launch_reads_all_sequences_in_place(
    name: str, window: int | None, triton_device: str, paged_calls: list[tuple[Any, ...]]
) -> None:
    store = Store.of(PASSES[name], block_size=4, device=triton_device)
    assert_follows_the_rule(store, window, attend(store, window))
    ((q, k, v, _),) = paged_calls
    assert len(q) == sum(store.queries)
    assert (k, v) == (store.k, store.v)  # no gathered copy


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", PASSES)
def test_cuda_passes_follow_the_rule(name: str, window: int | None, dtype: torch.dtype) -> None:
    """The implementation is the one that a server on this machine would choose."""
    store = Store.of(PASSES[name], block_size=4, dtype=dtype, device="cuda")
    out = attend(store, window)
    assert_follows_the_rule(store, window, out, tolerance=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("window", [None, 1, 5, 7, 16, 1000])
@pytest.mark.parametrize("column_tile", [1, 4, 5])
@pytest.mark.parametrize("query_tile", [1, 4, 7])
def test_queries_are_computed_in_tiles(
    query_tile: int, column_tile: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_layout, "QUERY_TILE", query_tile)
    monkeypatch.setattr(attention_layout, "COLUMN_TILE", column_tile)
    store = Store.of([(1, 9), (21, 21), (8, 30), (5, 12)], block_size=4)
    assert_follows_the_rule(store, window)
    tiles = [tile for segment in store.layout.prefill_segments(window) for tile in segment.tiles]
    assert sum(tile.queries.stop - tile.queries.start for tile in tiles) == 21 + 8 + 5
    assert max(tile.queries.stop - tile.queries.start for tile in tiles) == query_tile
    widths = [tile.columns.stop - tile.columns.start for tile in tiles]
    assert all(width % column_tile == 0 for width in widths)
    if window is not None:  # tiles read only columns that a query sees, rounded up to whole tiles
        assert max(widths) < query_tile + window + 2 * column_tile
