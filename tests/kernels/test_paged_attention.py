"""Paged attention: reference and Triton kernel against an oracle in float64, on poisoned stores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels.paged_attention
from kernels.attention_layout import PagedIndices
from kernels.paged_attention import (
    paged_attention_reference,
    paged_attention_triton,
    queries_per_tile,
)
from tests.kernels.interpreter import patch_dot
from tests.kernels.support import FAR, SCALE, Store, far_apart

EDGES = (1, 2, 15, 16, 17, 32, 33)  # lengths: one, within, at and past the edges of blocks of 16
MIXED = (1, 33, (5, 9), (17, 17), (40, 52))  # decode, guesses, a prompt, a chunk: queries and columns
HEADS = {"MHA": (2, 2), "group of 3": (6, 2), "group of 4": (8, 2), "group of 8": (16, 2), "MQA": (16, 1)}
HEAD_DIMS = [64, 80, 96, 128, 256]

Sequences = Sequence[int | tuple[int, int]]  # columns of a sequence of one query; or queries, columns


@pytest.fixture(autouse=True)
def rows_are_computed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_dot(monkeypatch)


SPLIT = 128  # columns of a split where a test needs several: the interpreter is slow


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.paged_attention, "SPLIT_COLUMNS", SPLIT)


@pytest.fixture
def memory_starts_as_nan() -> Iterator[None]:
    """Make `torch.empty` return NaN, so that reading memory before it is written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


class Case:
    """The queries of one pass, and a store in which all rows that the position rule hides are NaN."""

    def __init__(
        self,
        sequences: Sequences,
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        block_size: int = 16,
        window: int | None = None,
        **options: Any,
    ) -> None:
        pairs = [(1, each) if isinstance(each, int) else each for each in sequences]
        store = Store.of(pairs, block_size, heads, head_dim=head_dim, window=window, **options)
        self.q, self.k_store, self.v_store = store.q, store.k, store.v
        tile_queries = queries_per_tile(heads[0] // heads[1], store.q.dtype)
        self.indices = store.layout.paged(tile_queries) if pairs else no_queries(store.table)
        self.window, self.columns = window, store.columns
        self.oracle: Callable[[], Tensor] = lambda: store.oracle(window)

    def run(self, **changes: Any) -> Tensor:
        """Run the Triton kernel on this case, with some indices replaced."""
        indices = dataclasses.replace(self.indices, **changes)
        return paged_attention_triton(
            self.q, self.k_store, self.v_store, indices, scale=SCALE, window=self.window
        )

    def reference(self) -> Tensor:
        """Run the torch reference on this case, in float32."""
        arrays = self.q.float(), self.k_store.float(), self.v_store.float(), self.indices
        return paged_attention_reference(*arrays, scale=SCALE, window=self.window)


def no_queries(table: Tensor) -> PagedIndices:
    positions = torch.zeros(0, dtype=torch.int64, device=table.device)
    return PagedIndices(table, positions, torch.zeros(0, 3, dtype=torch.int32, device=table.device), 0, 0, 1)


def assert_exact(actual: Tensor, case: Case) -> None:
    """Assert that a float32 result is within 1e-5 of the oracle."""
    expected = case.oracle()
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    assert actual.is_contiguous()
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- the rule


PASSES: list[dict[str, Any]] = [
    *({"heads": heads, "window": window} for heads in HEADS.values() for window in (None, 1, 20)),
    *({"sequences": [17, (3, 3)], "heads": heads} for heads in ((20, 1), (128, 2))),  # groups of more than 16
    *(
        {"sequences": [1, (2, 16), (20, 33)], "head_dim": head_dim, "window": window}
        for head_dim in (8, 40, *HEAD_DIMS)
        for window in (None, 20)
    ),
    # Block sizes from one column to a slot of full length, which is one block.
    *(
        {"sequences": [1, 2, 3, (4, 4), 63, (2, 64), 65, 200], "heads": (2, 1), "block_size": size}
        | {"window": window}
        for size in (1, 3, 4, 16, 64, 100, 4096)
        for window in (None, 5, 150)
    ),
    {"sequences": EDGES},
    {"sequences": [(150, 150)], "heads": (2, 1)},
    {"sequences": [(150, 350)], "heads": (2, 1), "window": 100},
]


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=() if i % 3 == 0 or i >= len(PASSES) - 3 else pytest.mark.slow)
        for i, form in enumerate(PASSES)
    ],
    ids=str,
)
def test_every_query_sees_what_the_rule_shows_it(triton_device, form):
    case = Case(**{"sequences": MIXED, **form}, device=triton_device)
    assert_exact(case.run(), case)
    assert_exact(case.reference(), case)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sequences=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 60)), min_size=1, max_size=4),
    block_size=st.integers(1, 40),
    window=st.none() | st.integers(1, 100),
    group=st.sampled_from([1, 3, 5]),  # each pair of group and head_dim is compiled on a GPU
    heads_kv=st.integers(1, 2),
    head_dim=st.sampled_from([1, 3, 16, 41]),
    seed=st.integers(0, 2**16),
)
@pytest.mark.slow
def test_any_pass_follows_the_rule(
    triton_device, sequences, block_size, window, group, heads_kv, head_dim, seed
):
    case = Case(
        [(queries, queries + before) for queries, before in sequences],
        heads=(group * heads_kv, heads_kv),
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        device=triton_device,
        seed=seed,
    )
    assert_exact(case.run(), case)
    assert_exact(case.reference(), case)


def test_scores_far_apart_do_not_overflow(triton_device):
    """Scores up to about ±1,000, the largest first, last or in the middle of a sequence."""
    case = Case([1, 600, 600, 600], heads=(2, 1), device=triton_device)
    case.q *= 300
    for sequence, column in ((1, 0), (2, 150), (3, 599)):
        block = case.indices.block_table[sequence, column // 16]
        case.k_store[block, column % 16] *= 4
        case.columns[sequence][0][column] *= 4
    result = case.run()
    assert result.isfinite().all()
    torch.testing.assert_close(result.double().cpu(), case.oracle(), rtol=0, atol=1e-3)


# ---------------------------------------------------------------------- precision


def cut_to_bfloat16(x: Tensor) -> Tensor:
    """Convert float32 to bfloat16 as the interpreter does: the lower 16 bits are cut off."""
    return (x.contiguous().view(torch.int32) & -0x10000).view(torch.float32)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bfloat16_is_as_good_as_its_rounding(triton_device, head_dim, window):
    """Rounding a result to bfloat16 changes it by up to 1.6e-3 of its norm. The kernel's own error must be smaller:
    the difference to the float32 reference, rounded as the device rounds."""
    case = Case(
        [1, 16, (9, 33), 200],
        heads=(4, 1),
        head_dim=head_dim,
        window=window,
        dtype=torch.bfloat16,
        device=triton_device,
        seed=head_dim,
    )
    result = case.run()
    assert result.dtype == torch.bfloat16
    exact = case.reference()
    torch.testing.assert_close(exact.double().cpu(), case.oracle(), rtol=0, atol=1e-5)
    interpreted = triton_device == "cpu"
    rounded = cut_to_bfloat16(exact) if interpreted else exact.bfloat16().float()
    assert (result.float() - (rounded if interpreted else exact)).abs().max() < 1e-2
    assert (result.float() - rounded).norm() < 1e-3 * rounded.norm()


# ---------------------------------------------------------------------- splits

# Lengths within a split, at its end, past it, and of several splits; one query, guesses, and chunks across an end.
LONG = (1, SPLIT - 1, (3, SPLIT), SPLIT + 1, (4, 3 * SPLIT - 9), (30, SPLIT + 9))


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(
    ("programs", "window"),
    [
        *((2, None), (1, 250)),
        *(
            pytest.param(programs, window, marks=pytest.mark.slow)
            for programs, window in ((1, None), (1, 75), (2, 75), (2, 250), (32, None), (32, 75), (32, 250))
        ),
    ],
)
def test_splits_change_nothing(triton_device, memory_starts_as_nan, monkeypatch, programs, window):
    """Programs share the splits of leading sequences, or take several each. Other sequences have one program."""
    monkeypatch.setattr(kernels.paged_attention, "MOST_PROGRAMS", programs)
    case = Case(LONG, heads=(2, 1), window=window, device=triton_device)
    result = case.run()
    assert_exact(result, case)
    assert torch.equal(result, case.run(split_rows=0)), "merged in registers, in the same order"
    assert torch.equal(result, case.run(max_length=10**5)), (
        "more programs than splits: they have nothing to do"
    )


# ---------------------------------------------------------------------- a row's bits


@pytest.mark.parametrize(
    ("heads", "dtype", "window"),
    [
        ((3, 1), torch.bfloat16, 150),
        pytest.param((4, 2), torch.float32, None, marks=pytest.mark.slow),
        pytest.param((4, 2), torch.float32, 150, marks=pytest.mark.slow),
        pytest.param((3, 1), torch.bfloat16, None, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.usefixtures("short_splits")
def test_a_rows_bits_depend_on_its_own_sequence_alone(triton_device, heads, window, dtype):
    """The row may be decoded alone, verified with guesses, or prefilled in chunks, beside any neighbours."""
    options = {"heads": heads, "window": window, "dtype": dtype, "device": triton_device}
    case = Case([33, (30, 280), 150, (1, 7)], **options, poison=0.0)
    together = case.run()
    rows = range(1, 31)  # the second sequence's rows
    tile_queries = queries_per_tile(heads[0] // heads[1], dtype)
    for count in (1, 3, tile_queries):
        for first in range(rows.start, rows.stop - count, 13):
            alone = slice(first, first + count)
            tiles = torch.tensor([[1, 0, count]], dtype=torch.int32, device=triton_device)
            indices = PagedIndices(
                case.indices.block_table, case.indices.positions[alone], tiles, count, 280, count
            )
            result = paged_attention_triton(
                case.q[alone], case.k_store, case.v_store, indices, scale=SCALE, window=window
            )
            assert torch.equal(result, together[alone]), (count, first)


# ---------------------------------------------------------------------- memory


@pytest.mark.usefixtures("short_splits")
def test_a_nan_stays_with_its_sequence(triton_device):
    case = Case([40, 150, (20, 30)], device=triton_device)
    before = case.run()
    last = case.indices.block_table[1, 149 // 16]
    case.k_store[last, 149 % 16, 0, 3] = math.nan
    after = case.run()
    assert after[1, :2].isnan().all()  # the heads that share KV head 0
    assert torch.equal(after[1, 2:], before[1, 2:])
    assert torch.equal(after[2:], before[2:])
    assert torch.equal(after[0], before[0])


def test_strides_are_followed(triton_device):
    """q is part of a fused QKV matrix, the store has heads before columns, the table is cut from a wider one."""
    case = Case(MIXED, heads=(4, 2), head_dim=80, device=triton_device)
    case.q = torch.cat((case.q, torch.full_like(case.q, math.nan)), dim=1)[:, :4]
    case.k_store, case.v_store = (
        torch.stack((torch.full_like(x, math.nan), x)).transpose(2, 3).contiguous().transpose(2, 3)[1]
        for x in (case.k_store, case.v_store)
    )
    table, positions = case.indices.block_table, case.indices.positions
    wider = torch.cat((table, table * 0), dim=1)[:, : table.shape[1]]
    case.indices = dataclasses.replace(
        case.indices, block_table=wider, positions=torch.stack((positions, positions * 0), dim=1)[:, 0]
    )
    assert not case.q.is_contiguous()
    assert not case.k_store.is_contiguous()
    assert_exact(case.run(), case)
    case.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)  # heads before sequences
    assert_exact(case.run(), case)
    case.q = torch.stack((case.q, case.q), dim=3)[..., 0]
    gaps = torch.stack((table, table), dim=2)[..., 0]
    assert case.q.stride(2) == gaps.stride(1) == 2
    assert_exact(case.run(block_table=gaps), case)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 2, 2), (FAR, 64, 32)), ((1, 3, 2), (128, FAR, 32)), ((2, 1, 3), (64, 32, FAR))],
    ids=["blocks", "columns", "heads"],
)
def test_store_offsets_beyond_32_bits(triton_device, shape, strides):
    """The last block, column or head starts past element 2^31."""
    blocks, block_size, heads = shape
    small = Case(
        [blocks * block_size],
        heads=(heads, heads),
        head_dim=32,
        block_size=block_size,
        dtype=torch.float16,
        device=triton_device,
    )
    expected = small.run()
    table = small.indices.block_table[0, :blocks]
    stores = [
        far_apart(1024, torch.float16, triton_device).as_strided((*shape, 32), (*strides, 1))
        for _ in range(2)
    ]
    for store, source in zip(stores, (small.k_store, small.v_store), strict=True):
        store.copy_(source[table])
    small.k_store, small.v_store = stores
    result = small.run(block_table=torch.arange(blocks, device=triton_device)[None])
    assert torch.equal(result, expected)
    assert result.isfinite().all()
