"""Every pool of every phase keeps one contract. A line in `POOLS` adds a pool to these tests.

The contract covers bookkeeping (integers), the addresses of views, and attention over these addresses, which is
compared with plain attention over one sequence at a time.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import phase4_static
import phase5_continuous
import phase6_paged
import phase7_chunked
import phase8_prefix
import phase11_tiered
from common.engine.reference import ContiguousCache
from common.kv import KVCapacityError, KVPool, KVShape, Span
from common.request import Request
from phase4_static.cache import StaticKVCache
from phase5_continuous.cache import SlottedKVCache
from phase6_paged.cache import PagedKVCachePool
from phase8_prefix.cache import PrefixCachingPool
from tests.support.engines import CPU, greedy

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 4
SHAPE = KVShape(LAYERS, KV_HEADS, HEAD_DIM, torch.float32)
COLUMNS = 48  # of one sequence
NEW = 8


@dataclass(frozen=True)
class Kind:
    """A pool, and the parts of the contract that apply to it."""

    make: Callable[[], KVPool]
    sequences: int  # the most that it holds
    fills_up: bool = True  # `reserve` fails if no memory is left
    admits_any_time: bool = True  # `reserve` works after a pass has run, too
    counts_slots: bool = False  # knows how many more sequences can begin
    idle_tokens: int = 0  # reserved while no request holds memory


def paged(block_size: int, config: Any = phase6_paged.Config, kind: Any = PagedKVCachePool) -> Kind:
    def make() -> KVPool:
        options = config(max_seq_len=COLUMNS, block_size=block_size, num_blocks=3 * -(-COLUMNS // block_size))
        pool: PagedKVCachePool = kind(options, SHAPE, CPU)
        random.Random(block_size).shuffle(pool.allocator._free)
        return pool

    return Kind(make, 3, counts_slots=True)


def tiered() -> KVPool:
    """Return a pool with a file, which is removed at the end."""
    pool = paged(4, phase11_tiered.Config, phase11_tiered.Pool).make()
    assert isinstance(pool, phase11_tiered.Pool)
    folder = tempfile.TemporaryDirectory()
    weakref.finalize(pool, folder.cleanup)
    config = phase11_tiered.Config(kv_tier=Path(folder.name), kv_tier_bytes=2**20)
    pool.open_tier(config, fingerprint=bytes(32), token_s=1.0)
    assert pool.tier is not None
    return pool


POOLS = {
    "contiguous, of one": Kind(lambda: ContiguousCache(SHAPE, CPU, COLUMNS), 1, idle_tokens=COLUMNS),
    "contiguous, of three": Kind(
        lambda: ContiguousCache(SHAPE, CPU, COLUMNS, sequences=3), 3, idle_tokens=3 * COLUMNS
    ),
    "static": Kind(
        lambda: StaticKVCache(phase4_static.Config(max_seq_len=COLUMNS), SHAPE, CPU),
        3,
        fills_up=False,
        admits_any_time=False,
    ),
    "slotted": Kind(
        lambda: SlottedKVCache(
            phase5_continuous.Config(max_seq_len=COLUMNS, max_batch_size=3), SHAPE, CPU
        ),
        3,
        counts_slots=True,
    ),
    **{f"paged-{size}": paged(size) for size in (1, 3, 4, 16, 64)},
    "paged-of-phase-7": paged(16, phase7_chunked.Config),
    **{f"prefix-caching-{size}": paged(size, phase8_prefix.Config, PrefixCachingPool) for size in (1, 4, 16)},
    "tiered": Kind(tiered, 3, counts_slots=True),
}  # fmt: skip


@pytest.fixture(params=POOLS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return POOLS[request.param]


@pytest.fixture
def pool(kind: Kind) -> KVPool:
    return kind.make()


first_tokens = itertools.count()


def seat(pool: KVPool, *prompts: int) -> list[Request]:
    """Return requests that hold memory for their prompts. The prompts begin with different tokens."""
    requests = [Request(str(i), [next(first_tokens)] * n, greedy(NEW)) for i, n in enumerate(prompts)]
    for each in requests:
        assert pool.reserve(each, each.num_prompt_tokens)
    return requests


def slot_of(request: Request) -> int:
    assert request.slot is not None
    return request.slot


def rows_of(pool: KVPool, request: Request) -> list[int]:
    """Return the rows of the flat store that a request owns, in column order."""
    size = pool.block_size
    return [block * size + i for block in pool.block_table(slot_of(request)) for i in range(size)]


def write(pool: KVPool, spans: Sequence[Span], value: float = 1.0) -> None:
    """Run a pass over the spans that stores `value` in every layer."""
    view = pool.view(spans)
    tokens = len(view.layout.write_addresses)
    q, k = torch.zeros(tokens, HEADS, HEAD_DIM), torch.full((tokens, KV_HEADS, HEAD_DIM), value)
    for layer in range(LAYERS):
        view.attend(layer, q, k, k, scale=1.0, window=None)
    view.advance()


def lengths(kind: Kind) -> list[int]:
    return [5, 16, 30][: kind.sequences]


# ---------------------------------------------------------------------- bookkeeping


def test_as_many_sequences_can_begin_as_there_are_free_slots(kind: Kind, pool: KVPool) -> None:
    if not kind.counts_slots:
        pytest.skip("rows, or a single sequence: nobody counts them")
    assert isinstance(pool, (SlottedKVCache, PagedKVCachePool))
    seat(pool, 16)
    free = pool.free_slot_count()
    assert free > 0
    shortest = seat(pool, *[1] * free)
    assert pool.free_slot_count() == 0
    assert not pool.reserve(Request("one more", [1], greedy(1)), 1)
    pool.release(shortest[0])
    assert pool.free_slot_count() == 1


def test_releasing_frees_all_memory_and_releasing_again_changes_nothing(kind: Kind, pool: KVPool) -> None:
    requests = seat(pool, *lengths(kind))
    write(pool, [Span.exact(slot_of(r), 0, r.num_prompt_tokens) for r in requests])
    assert pool.used_tokens == sum(lengths(kind)) <= pool.reserved_tokens
    for each in [*requests, *requests]:
        pool.release(each)
        assert each.slot is None
    assert (pool.used_tokens, pool.reserved_tokens) == (0, kind.idle_tokens)
    assert pool.audit([]) == 0
    again = seat(pool, *lengths(kind))
    assert [pool.get_seq_len(slot_of(r)) for r in again] == [0] * len(again), "a new owner starts empty"


def test_a_full_pool_refuses_and_changes_nothing(kind: Kind, pool: KVPool) -> None:
    if not kind.fills_up:
        pytest.skip("its scheduler decides how many rows a batch has")
    requests = seat(pool, *[COLUMNS - NEW] * kind.sequences)
    for each in requests:
        if kind.sequences > 1:
            assert pool.reserve(each, COLUMNS)
    late = Request("late", [1] * COLUMNS, greedy(1))
    before = pool.reserved_tokens, pool.used_tokens, pool.free_token_capacity()
    tables = [list(pool.block_table(slot_of(r))) for r in requests]
    assert not pool.reserve(late, COLUMNS)
    assert late.slot is None
    assert (pool.reserved_tokens, pool.used_tokens, pool.free_token_capacity()) == before
    assert [list(pool.block_table(slot_of(r))) for r in requests] == tables
    pool.release(requests[0])
    assert pool.reserve(late, COLUMNS), "what one gave back is the next one's"
    assert pool.capacity(slot_of(late)) >= COLUMNS


def test_the_largest_request_fits_alone_and_one_more_token_does_not(kind: Kind, pool: KVPool) -> None:
    limit = pool.max_request_tokens()
    if limit is None:
        pytest.skip("rows are as long as the batch needs")
    too_large = Request("too large", [1], greedy(1))
    assert not pool.reserve(too_large, limit + 1)
    assert (too_large.slot, pool.reserved_tokens) == (None, kind.idle_tokens)
    assert pool.reserve(too_large, limit)


@pytest.mark.parametrize("kept", [0, 10**6])
def test_spare_columns_leave_the_memory_that_must_stay_free(kept: int, kind: Kind, pool: KVPool) -> None:
    requests = seat(pool, *lengths(kind))
    for own in requests:
        free, tokens = pool.free_token_capacity(), own.num_tokens
        last = -(-tokens // pool.block_size) * pool.block_size
        given = pool.reserve_spare(own, tokens + 3, kept)
        assert given == (tokens + 3 if kept == 0 or free is None else min(tokens + 3, last))
        assert pool.capacity(slot_of(own)) >= given
        if given == min(tokens + 3, last):
            assert pool.free_token_capacity() == free, "no block was taken"


def test_a_released_slot_is_a_key_error(kind: Kind, pool: KVPool) -> None:
    requests = seat(pool, *lengths(kind))
    gone = slot_of(requests[0])
    pool.release(requests[0])
    for ask in (pool.capacity, pool.get_seq_len, pool.block_table):
        with pytest.raises(KeyError):
            ask(gone)
    with pytest.raises(KeyError):
        pool.view([Span.exact(gone, 0, 1)])


def test_an_audit_frees_memory_that_no_request_holds(kind: Kind, pool: KVPool) -> None:
    requests = seat(pool, *lengths(kind))
    waiting = Request("waiting", [1], greedy(1))
    assert pool.audit([*requests, waiting]) == 0
    kept = requests[1:]
    assert pool.audit([*kept, waiting]) == 1
    assert pool.audit([*kept, waiting]) == 0
    with pytest.raises(KeyError):
        pool.get_seq_len(slot_of(requests[0]))
    for each in kept:
        assert pool.capacity(slot_of(each)) >= each.num_prompt_tokens
        pool.release(each)
    assert (pool.used_tokens, pool.reserved_tokens) == (0, kind.idle_tokens)


# ---------------------------------------------------------------------- addresses


def test_a_cleared_pool_is_like_a_new_one(kind: Kind, pool: KVPool) -> None:
    fresh = kind.make()
    for _ in range(2):
        requests = seat(pool, *lengths(kind))
        write(pool, [Span.exact(slot_of(each), 0, each.num_prompt_tokens) for each in requests])
        pool.release(requests[0])  # the pool may keep its blocks
        pool.clear()
        assert (pool.used_tokens, pool.reserved_tokens) == (fresh.used_tokens, fresh.reserved_tokens)
        assert (len(pool.slots), pool.free_token_capacity()) == (0, fresh.free_token_capacity())
        assert (list(pool.kept_blocks()), pool.audit([])) == ([], 0)


def test_a_view_addresses_every_token_in_columns_of_its_own_sequence(kind: Kind, pool: KVPool) -> None:
    requests = seat(pool, *lengths(kind))
    write(pool, [Span.exact(slot_of(r), 0, 3) for r in requests])
    spans = [Span.exact(slot_of(r), 3, 3 + i + 1) for i, r in enumerate(requests)][::-1]
    view = pool.view(spans)
    owners = requests[::-1]
    assert view.positions.tolist() == [c for s in spans for c in range(s.start, s.end)]
    assert view.layout.write_addresses.tolist() == [
        rows_of(pool, r)[c] for r, s in zip(owners, spans, strict=True) for c in range(s.start, s.end)
    ]
    layout = view.layout
    assert layout.query_lengths == tuple(s.end - s.start for s in spans)
    assert layout.kv_lengths == tuple(s.end for s in spans)
    assert layout.block_size == pool.block_size
    for own, span, row in zip(owners, spans, layout.block_table.tolist(), strict=True):
        needed = -(-span.end // pool.block_size)
        assert row[:needed] == list(pool.block_table(slot_of(own)))[:needed]
        assert all(0 <= block < len(pool.k[0]) for block in row), (
            "nobody reads past its end, but it can be read"
        )


def test_a_pass_changes_columns_of_its_own_sequences_and_no_others(kind: Kind, pool: KVPool) -> None:
    requests = seat(pool, *lengths(kind))
    write(pool, [Span.exact(slot_of(r), 0, 2) for r in requests], value=3.0)
    before = [layer.clone() for layer in (*pool.k, *pool.v)]
    own = requests[-1]
    write(pool, [Span.exact(slot_of(own), 2, 5)], value=7.0)
    changed = set(rows_of(pool, own)[2:5])
    for old, new in zip(before, (*pool.k, *pool.v), strict=True):
        differs = (old != new).flatten(0, 1).flatten(1).any(1)
        assert set(differs.nonzero().flatten().tolist()) == changed


@pytest.mark.parametrize("case", ["past the end", "wholly past the end", "before 0", "empty", "gap", "twice"])
def test_a_pass_outside_its_own_columns_is_refused_and_leaves_no_trace(
    kind: Kind, pool: KVPool, case: str
) -> None:
    requests = seat(pool, *lengths(kind))
    write(pool, [Span.exact(slot_of(r), 0, 4) for r in requests])
    before = [layer.clone() for layer in (*pool.k, *pool.v)]
    slot = slot_of(requests[0])
    end = pool.capacity(slot)
    spans = {
        "past the end": [Span.exact(slot, 4, end + 1)],
        "wholly past the end": [Span.exact(slot, end, end + 1)],
        "before 0": [Span.exact(slot, -1, 3)],
        "empty": [Span.exact(slot, 4, 4)],
        "gap": [Span.exact(slot, 5, end)] if end > 5 else [Span.exact(slot, 5, 6)],
        "twice": [Span.exact(slot, 0, 2), Span.exact(slot, 0, 2)],
    }[case]
    with pytest.raises(KVCapacityError):
        pool.view([*[Span.exact(slot_of(r), 4, 5) for r in requests[1:]], *spans])
    assert [pool.get_seq_len(slot_of(r)) for r in requests] == [4] * len(requests)
    assert all(torch.equal(a, b) for a, b in zip(before, (*pool.k, *pool.v), strict=True))


def test_lengths_count_real_tokens_and_change_after_success(kind: Kind, pool: KVPool) -> None:
    requests = seat(pool, *lengths(kind))
    own = slot_of(requests[0])
    view = pool.view([Span(own, 0, 5, 3)])  # two columns of padding
    assert pool.get_seq_len(own) == 0
    view.advance()
    assert pool.get_seq_len(own) == pool.used_tokens == 3
    pool.view([Span.exact(own, 3, 5)])  # a pass that fails never advances
    assert pool.get_seq_len(own) == 3


# ---------------------------------------------------------------------- attention


def plain_attention(q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
    """Return attention of one sequence, [Tq, Hq, D]: q [Tq, Hq, D] from column `start` on, k and v [T, Hkv, D]."""
    group = HEADS // KV_HEADS
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.5
    p, c = torch.arange(start, start + len(q))[:, None], torch.arange(len(k))
    hidden = (c > p) | ((p - c) >= (window if window is not None else 10**9))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize(("window", "seed"), [(None, 0), (1, 1), (6, 2)])
def test_attention_over_any_history_is_plain_attention(
    kind: Kind, pool: KVPool, window: int | None, seed: int
) -> None:
    """Prompts come in pieces, decode runs beside them, and new sequences take the memory of released ones."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    live = {r: [(draw(0, KV_HEADS, HEAD_DIM),) * 2] * LAYERS for r in seat(pool, *lengths(kind))}
    compared = 0
    for _ in range(40):
        chosen = [r for r in live if rng.random() < 0.8] or list(live)[:1]
        spans, owners = [], []
        for own in chosen:
            start = pool.get_seq_len(slot_of(own))
            end = min(start + rng.choice([1, 1, 1, 2, 7]), own.max_total_tokens, COLUMNS)
            grows = kind.admits_any_time and kind.sequences > 1
            if start < end and (not grows or pool.reserve(own, end)):
                spans.append(Span.exact(slot_of(own), start, end))
                owners.append(own)
        order = sorted(range(len(spans)), key=lambda i: spans[i].end - spans[i].start > 1)
        spans, owners = [spans[i] for i in order], [owners[i] for i in order]
        if spans:
            view = pool.view(spans)
            sizes = [s.end - s.start for s in spans]
            for layer in range(LAYERS):
                q, k, v = (draw(sum(sizes), h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
                got = view.attend(layer, q, k, v, scale=0.5, window=window).split(sizes)
                for i, own in enumerate(owners):
                    parts = q.split(sizes)[i], k.split(sizes)[i], v.split(sizes)[i]
                    keys, values = (
                        torch.cat([old, new]) for old, new in zip(live[own][layer], parts[1:], strict=True)
                    )
                    live[own] = [(keys, values) if n == layer else kv for n, kv in enumerate(live[own])]
                    expected = plain_attention(parts[0], keys, values, spans[i].start, window)
                    torch.testing.assert_close(got[i], expected, atol=1e-5, rtol=1e-5)
                    compared += 1
            view.advance()
        if kind.admits_any_time and rng.random() < 0.2:
            gone = rng.choice(list(live))
            del live[gone]
            pool.release(gone)
            (heir,) = seat(pool, rng.randint(1, 30))
            live[heir] = [(draw(0, KV_HEADS, HEAD_DIM),) * 2] * LAYERS
    assert compared > 30
