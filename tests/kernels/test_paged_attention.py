"""Paged decode attention: reference and Triton kernel against an oracle in float64, on poisoned stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels.paged_attention
from kernels.paged_attention import (
    MIN_SPLIT_COLUMNS,
    choose_num_splits,
    paged_attention_reference,
    paged_attention_triton,
)
from tests.kernels.support import FAR, SCALE, Store, far_apart

EDGES = (0, 1, 15, 16, 17, 32, 33)  # lengths: nothing, one, within, at and past the edges of blocks of 16
HEADS = {"MHA": (2, 2), "group of 3": (6, 2), "group of 4": (8, 2), "group of 8": (16, 2), "MQA": (16, 1)}
HEAD_DIMS = [64, 80, 96, 128, 256]


@pytest.fixture(autouse=True)
def dot_takes_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teach Triton's interpreter to multiply bfloat16 matrices.

    It keeps bfloat16 as 16-bit integers and, as of Triton 3.9, multiplies those (triton-lang/triton#11584).
    Compiled kernels are not affected.
    """
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16 or x.data.dtype != np.uint16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    original = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return original(self, widened(a), widened(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def memory_starts_as_nan() -> Iterator[None]:
    """`torch.empty` hands out NaN: what nobody wrote, nobody may read."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


class Case:
    """One decode step's queries, and a store in which every row that the position rule hides is NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        block_size: int = 16,
        window: int | None = None,
        index_dtype: torch.dtype = torch.int64,
        **options: Any,
    ) -> None:
        sequences = [(1, length) for length in lengths]
        store = Store.of(sequences, block_size, heads, head_dim=head_dim, window=window, **options)
        self.q, self.k_store, self.v_store = store.q, store.k, store.v
        self.block_table = store.table.to(index_dtype)
        self.lengths = torch.tensor(lengths, dtype=index_dtype, device=store.q.device)
        self.window, self.columns = window, store.columns
        self.longest = max(lengths, default=0)
        self.oracle: Callable[[], Tensor] = lambda: store.oracle(window)

    def run(self, **options: Any) -> Tensor:
        """The Triton kernel on this case."""
        defaults = {"scale": SCALE, "window": self.window, "max_length": self.longest}
        stores = self.k_store, self.v_store, self.block_table, self.lengths
        return paged_attention_triton(self.q, *stores, **(defaults | options))

    def reference(self) -> Tensor:
        """The torch reference on this case, in float32."""
        arrays = self.q.float(), self.k_store.float(), self.v_store.float(), self.block_table, self.lengths
        return paged_attention_reference(*arrays, scale=SCALE, window=self.window)


def assert_exact(actual: Tensor, case: Case) -> None:
    """float32: within 1e-5 of the oracle."""
    expected = case.oracle()
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    assert actual.is_contiguous()
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- the rule


STEPS: list[dict[str, Any]] = [
    *({"heads": heads, "window": window} for heads in HEADS.values() for window in (None, 1, 20)),
    *({"lengths": [17, 3], "heads": heads} for heads in ((20, 1), (128, 2))),  # groups of more than 16
    *(
        {"lengths": [0, 1, 16, 33], "head_dim": head_dim, "window": window}
        for head_dim in (8, 40, *HEAD_DIMS)
        for window in (None, 20)
    ),
    # Down to a block per column, and up to a contiguous slot, which is one block as long as can be.
    *(
        {"lengths": [0, 1, 2, 3, 4, 63, 64, 65, 200], "heads": (2, 1), "block_size": size, "window": window}
        for size in (1, 3, 4, 16, 64, 100, 4096)
        for window in (None, 5, 150)
    ),
    *({"index_dtype": dtype} for dtype in (torch.int32, torch.int64)),
]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_every_query_sees_what_the_rule_shows_it(triton_device, step):
    case = Case(**{"lengths": EDGES, **step}, device=triton_device)
    assert_exact(case.run(), case)
    assert_exact(case.reference(), case)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    block_size=st.integers(1, 40),
    window=st.none() | st.integers(1, 100),
    group=st.integers(1, 5),
    heads_kv=st.integers(1, 2),
    head_dim=st.integers(1, 48),
    seed=st.integers(0, 2**16),
)
def test_any_step_follows_the_rule(
    triton_device, lengths, block_size, window, group, heads_kv, head_dim, seed
):
    case = Case(
        lengths,
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
    case = Case([1, 300, 300, 300], heads=(2, 1), device=triton_device)
    case.q *= 300
    for sequence, column in ((1, 0), (2, 150), (3, 299)):
        block = case.block_table[sequence, column // 16]
        case.k_store[block, column % 16] *= 4
        case.columns[sequence][0][column] *= 4
    result = case.run(num_splits=2)
    assert result.isfinite().all()
    torch.testing.assert_close(result.double().cpu(), case.oracle(), rtol=0, atol=1e-3)


# ---------------------------------------------------------------------- precision


def cut_to_bfloat16(x: Tensor) -> Tensor:
    """How the interpreter makes bfloat16 of float32: the lower 16 bits are cut off."""
    return (x.contiguous().view(torch.int32) & -0x10000).view(torch.float32)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bfloat16_is_as_good_as_its_rounding(triton_device, head_dim, window, splits):
    """Rounding a result to bfloat16 costs up to 1.6e-3 of its norm, and nothing can be done about that. What the
    kernel adds is less: in norm it is held against the float32 reference, rounded the way the device rounds."""
    lengths = [0, 1, 16, 33, 300]
    case = Case(
        lengths,
        heads=(4, 1),
        head_dim=head_dim,
        window=window,
        dtype=torch.bfloat16,
        device=triton_device,
        seed=head_dim,
    )
    result = case.run(num_splits=splits)
    assert result.dtype == torch.bfloat16
    exact = case.reference()
    torch.testing.assert_close(exact.double().cpu(), case.oracle(), rtol=0, atol=1e-5)
    interpreted = triton_device == "cpu"
    rounded = cut_to_bfloat16(exact) if interpreted else exact.bfloat16().float()
    assert (result.float() - (rounded if interpreted else exact)).abs().max() < 1e-2
    assert (result.float() - rounded).norm() < 1e-3 * rounded.norm()


def test_float16(triton_device):
    case = Case(EDGES, dtype=torch.float16, device=triton_device)
    result = case.run()
    assert result.dtype == torch.float16
    torch.testing.assert_close(result.double().cpu(), case.oracle(), rtol=2**-10, atol=1e-3)


# ---------------------------------------------------------------------- splits

# Around the length up to which nothing is split, up to what five splits are needed for.
LONG = (0, 1, MIN_SPLIT_COLUMNS - 1, MIN_SPLIT_COLUMNS, MIN_SPLIT_COLUMNS + 1, 700, 5 * MIN_SPLIT_COLUMNS + 9)


@pytest.mark.parametrize("window", [None, 300, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("splits", [1, 2, 5, pytest.param(40, marks=pytest.mark.slow)])
def test_splits_change_nothing(triton_device, memory_starts_as_nan, splits, window):
    """More splits than 16 are merged in several rounds; those that a sequence has no columns for write nothing."""
    case = Case(LONG, heads=(2, 1), window=window, device=triton_device, seed=splits)
    assert_exact(case.run(num_splits=splits), case)


@pytest.mark.parametrize("loud", [5, 350, 690])
def test_many_splits_in_use(triton_device, memory_starts_as_nan, monkeypatch, loud):
    """22 splits are merged in two rounds, and the largest scores are found in the first or in the second."""
    monkeypatch.setattr(kernels.paged_attention, "MIN_SPLIT_COLUMNS", 1)
    case = Case([20, 700], heads=(4, 2), head_dim=256, device=triton_device)  # tiles of 16 columns
    case.q[1] *= 0.2  # several splits count, and not the loudest alone
    block = case.block_table[1, loud // 16]
    case.k_store[block, loud % 16] += case.q[1].view(2, 2, 256).mean(1)
    case.columns[1][0][loud] = case.k_store[block, loud % 16].double().cpu().numpy()
    assert_exact(case.run(num_splits=40), case)


@pytest.mark.parametrize("head_dim", [80, 128])
def test_splits_of_grouped_heads(triton_device, memory_starts_as_nan, head_dim):
    case = Case([600, 40, 0], heads=(6, 2), head_dim=head_dim, block_size=3, device=triton_device)
    assert_exact(case.run(num_splits=2), case)


@pytest.mark.parametrize("claimed", [0, 1, 10**6])
def test_a_wrong_longest_length_costs_time_only(triton_device, memory_starts_as_nan, monkeypatch, claimed):
    """Lengths count on the device: a captured launch is replayed while its sequences grow."""
    monkeypatch.setattr(kernels.paged_attention, "_processors", lambda device: 2)
    case = Case([5, 600], heads=(2, 1), device=triton_device)
    assert_exact(case.run(max_length=claimed), case)


@dataclass
class Launches:
    """Stands for a kernel and notes the grids it would have been launched on."""

    grids: list[tuple[int, ...]]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *arguments, **options: None


def launches(monkeypatch: pytest.MonkeyPatch, case: Case, **options: Any) -> tuple[list, list]:
    """Grids of (attention, merge) launches. On meta tensors: there is no number for the host to wait for."""
    attend, merge = Launches([]), Launches([])
    monkeypatch.setattr(kernels.paged_attention, "_paged_attention_kernel", attend)
    monkeypatch.setattr(kernels.paged_attention, "_merge_splits_kernel", merge)
    monkeypatch.setattr(kernels.paged_attention, "_processors", lambda device: 100)
    for name in ("q", "k_store", "v_store", "block_table", "lengths"):
        setattr(case, name, getattr(case, name).to("meta"))
    case.run(**options)
    return attend.grids, merge.grids


@pytest.mark.parametrize(
    ("lengths", "window", "options", "splits"),
    [
        ([2000], None, {}, 8),  # one long sequence: pieces of 256
        ([200], None, {}, 1),
        ([2000], 400, {}, 2),  # what the window hides is not shared out
        ([300] * 120, None, {}, 1),  # programs enough
        (
            [300] * 119 + [3000],
            None,
            {"total_length": 119 * 300 + 3000},
            8,
        ),  # the last would keep all waiting
        ([2000], None, {"num_splits": 3}, 3),
    ],
)
def test_the_launch_follows_from_what_the_host_knows(monkeypatch, lengths, window, options, splits):
    case = Case(lengths, heads=(4, 2), window=window, block_size=4096)
    attend, merge = launches(monkeypatch, case, **options)
    assert attend == [(len(lengths), 2, splits)]
    assert merge == ([(len(lengths), 4)] if splits > 1 else [])


@given(
    lengths=st.lists(st.integers(0, 100_000), min_size=1, max_size=128),
    heads_kv=st.integers(1, 32),
    processors=st.integers(1, 200),
)
def test_the_choice_of_splits(lengths, heads_kv, processors):
    splits = choose_num_splits(max(lengths), sum(lengths) * heads_kv, processors)
    assert 1 <= splits <= max(1, -(-max(lengths) // MIN_SPLIT_COLUMNS))
    # What the longest sequence's programs get is no more than an even share, or than one split at least has.
    share = sum(lengths) * heads_kv / (2 * processors)
    assert max(lengths) / splits <= max(share + 1, MIN_SPLIT_COLUMNS)


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("window", [None, 300])
def test_what_is_visible_is_read_once_and_nothing_else(monkeypatch, window, splits):
    """By address: no row past a length or before a window is loaded, no table entry past the last block, and query
    heads that share keys read them together. The interpreter is asked: a GPU does not say what it loads."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled in this process")
    from triton.runtime.interpreter import InterpreterBuilder

    case = Case([0, 1, 33, 600], heads=(6, 2), head_dim=40, window=window)
    loads: list[np.ndarray] = []
    load = InterpreterBuilder.create_masked_load

    def create_masked_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        loads.append(np.broadcast_to(pointers.data, mask.data.shape)[mask.data].astype(np.int64).ravel())
        return load(self, pointers, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
    case.run(num_splits=splits)
    addresses = np.concatenate(loads)

    def reads(tensor: Tensor) -> Tensor:
        """How often every element of `tensor` was loaded; shape of `tensor`."""
        start, size = tensor.data_ptr(), tensor.numel() * tensor.itemsize
        inside = addresses[(addresses >= start) & (addresses < start + size)]
        counts = np.bincount((inside - start) // tensor.itemsize, minlength=tensor.numel())
        return torch.from_numpy(counts).view(tensor.shape)

    for store in (case.k_store, case.v_store):
        assert torch.equal(reads(store), (~store.isnan()).long())
    entries = reads(case.block_table) > 0
    expected = torch.zeros_like(entries)
    for b, (keys, _) in enumerate(case.columns):
        first = 0 if window is None else max(0, len(keys) - window)
        expected[b, first // 16 : -(-len(keys) // 16)] = True
    assert torch.equal(entries, expected)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_nan_stays_with_its_sequence(triton_device, splits):
    case = Case([40, 300, 17], device=triton_device)
    before = case.run(num_splits=splits)
    last = case.block_table[1, 299 // 16]
    case.k_store[last, 299 % 16, 0, 3] = math.nan
    after = case.run(num_splits=splits)
    assert after[1, :2].isnan().all()  # the heads that share KV head 0
    assert torch.equal(after[1, 2:], before[1, 2:])
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_a_sequence_does_not_depend_on_its_neighbours(triton_device):
    case = Case([33, 1, 200, 16], device=triton_device)
    together = case.run()
    for b in range(4):
        row = slice(b, b + 1)
        alone = paged_attention_triton(
            case.q[row],
            case.k_store,
            case.v_store,
            case.block_table[row],
            case.lengths[row],
            scale=SCALE,
            window=None,
            max_length=200,
        )
        assert torch.equal(together[row], alone)


def test_nothing_is_written(triton_device):
    case = Case([33, 1, 300], device=triton_device)
    names = ("q", "k_store", "v_store", "block_table", "lengths")
    before = {name: getattr(case, name).clone() for name in names}
    case.run(num_splits=2)
    for name in names:
        assert torch.equal(getattr(case, name).nan_to_num(9.0), before[name].nan_to_num(9.0)), name


def test_strides_are_followed(triton_device):
    """q inside a fused QKV matrix, one layer of a store with heads before columns, a table cut from a wider one."""
    case = Case(EDGES, heads=(4, 2), head_dim=80, device=triton_device)
    case.q = torch.cat((case.q, torch.full_like(case.q, math.nan)), dim=1)[:, :4]
    case.k_store, case.v_store = (
        torch.stack((torch.full_like(x, math.nan), x)).transpose(2, 3).contiguous().transpose(2, 3)[1]
        for x in (case.k_store, case.v_store)
    )
    case.block_table = torch.cat((case.block_table, case.block_table * 0), dim=1)[
        :, : case.block_table.shape[1]
    ]
    case.lengths = torch.stack((case.lengths, case.lengths * 0), dim=1)[:, 0]
    assert not case.q.is_contiguous()
    assert not case.k_store.is_contiguous()
    assert_exact(case.run(), case)
    case.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)  # heads before sequences
    assert_exact(case.run(), case)
    gaps = torch.stack((case.q, case.q), dim=3)[..., 0]
    case.q, case.block_table = gaps, torch.stack((case.block_table, case.block_table), dim=2)[..., 0]
    assert case.q.stride(2) == case.block_table.stride(1) == 2
    assert_exact(case.run(), case)


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
    table = small.block_table[0, :-1]
    stores = [
        far_apart(1024, torch.float16, triton_device).as_strided((*shape, 32), (*strides, 1))
        for _ in range(2)
    ]
    for store, source in zip(stores, (small.k_store, small.v_store), strict=True):
        store.copy_(source[table])
    small.k_store, small.v_store = stores
    small.block_table = torch.arange(blocks, device=triton_device)[None]
    result = small.run()
    assert torch.equal(result, expected)
    assert result.isfinite().all()


def test_query_offsets_beyond_32_bits(triton_device):
    case = Case([3, 3, 3], heads=(2, 1), dtype=torch.float16, device=triton_device)
    expected = case.run()
    spread = far_apart(128, torch.float16, triton_device).as_strided(case.q.shape, (FAR, 64, 1))
    spread.copy_(case.q)
    case.q = spread
    assert torch.equal(case.run(), expected)


def test_no_sequences(triton_device):
    case = Case([], device=triton_device)
    assert case.run().shape == (0, 4, 64)


# ---------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"v_store": torch.ones(3, 4, 2, 16)},
            r"v_store \[3, 4, 2, 16\].*\[blocks, block_size, KV heads, 8\]",
        ),
        ({"q": torch.ones(2, 4, 16)}, "KV heads, 16"),
        ({"q": torch.ones(2, 3, 8)}, "3 query heads cannot share 2 KV heads"),
        ({"q": torch.ones(2, 4, 8, dtype=torch.float16)}, r"q torch\.float16, k_store torch\.float32"),
        ({"k_store": torch.ones(3, 2, 4, 8).transpose(1, 2)}, "same strides"),
        ({"block_table": torch.zeros(1, 2, dtype=torch.int64)}, r"block_table \[1, 2\] must be \[2, N\]"),
        ({"lengths": torch.zeros(3, dtype=torch.int64)}, r"lengths \[3\] \[2\]"),
        ({"window": 0}, "at least 1.*but is 0"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    arguments = {
        "q": torch.ones(2, 4, 8),
        "k_store": torch.ones(3, 4, 2, 8),
        "v_store": torch.ones(3, 4, 2, 8),
        "block_table": torch.zeros(2, 2, dtype=torch.int64),
        "lengths": torch.zeros(2, dtype=torch.int64),
        "scale": 1.0,
        "window": None,
        "max_length": 0,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention_triton(**(arguments | change))
