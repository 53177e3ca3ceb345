"""Shared blocks in random histories: users are counted, blocks add up, and the tree's texts are the blocks' texts.

No model computes here: a pass writes each token's id as its key and value. So the tokens of a sequence and of the
tree's blocks can be read back from the store, and compared with a plain account of what was registered.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from common.engine.scheduling import PrefillChunk
from common.kv import Span
from common.request import Request, RequestState
from phase8_prefix.cache import PrefixCachingPool
from phase8_prefix.config import Config
from phase8_prefix.tree import Node, PrefixTree
from tests.support.engines import greedy
from tests.support.pools import CPU, SMALLEST, assert_consistent

GARBAGE = -7.0  # the numbers that a failed pass leaves behind
SEATS = 4

Text = tuple[str, tuple[int, ...]]  # salt, and whole blocks of token ids


def make_pool(num_blocks: int, block_size: int) -> PrefixCachingPool:
    config = Config(num_blocks=num_blocks, block_size=block_size, max_seq_len=64, max_batch_size=SEATS)
    return PrefixCachingPool(config, SMALLEST, CPU)


def texts(tree: PrefixTree) -> dict[Text, Node]:
    """Return every node, by the text of its whole path."""
    found: dict[Text, Node] = {}
    parents: dict[Node, Text] = {}
    for _, node in tree.walk():
        if node.parent in parents:
            salt, before = parents[node.parent]
            text = salt, (*before, *node.key)
        else:
            text = node.key[0], node.key[1:]
        parents[node] = text
        found[text] = node
    return found


def column(pool: PrefixCachingPool, slot: int, index: int) -> int:
    """Return the row of the flat store with column `index` of a sequence."""
    return pool.block_table(slot)[index // pool.block_size] * pool.block_size + index % pool.block_size


class Sharing:
    """A pool, its requests, and a plain account of cached texts, their users and the times of their last use."""

    def __init__(self, pool: PrefixCachingPool, seed: int = 0) -> None:
        self.pool = pool
        self.draw = random.Random(seed)
        self.waiting: list[Request] = []
        self.active: list[Request] = []
        self.operations = 0
        self.hits = self.evicted = self.preemptions = self.twins = self.refused = 0
        self._names, self._ticks = itertools.count(), itertools.count(1)
        self._account: dict[Text, int] = {}  # text -> the time of its last release
        self._held: dict[str, set[Text]] = {}  # by request
        self._evict = pool.tree.evict
        pool.tree.evict = self.evict  # type: ignore[method-assign]

    # ------------------------------------------------------------------ the account

    def blocks_of(self, request: Request, columns: int) -> list[Text]:
        size = self.pool.block_size
        ids = request.token_ids
        return [(request.cache_salt, tuple(ids[:end])) for end in range(size, columns + 1, size)]

    def expected_hits(self, request: Request) -> int:
        """Return the number of hit columns that the account predicts."""
        hits = 0
        for text in self.blocks_of(request, len(request.token_ids) - 1):
            if text not in self._account:
                break
            hits = len(text[1])
        return hits

    def in_use(self) -> set[Text]:
        return set().union(*self._held.values())

    def evict(self, count: int) -> list[int]:
        """Evict from the tree, which must take the unused leaves that were released the longest ago."""
        before = {text: node.block for text, node in texts(self.pool.tree).items()}
        blocks = self._evict(count)
        expected: list[int] = []
        while len(expected) < count:
            unused = self._account.keys() - self.in_use()
            leaves = [t for t in unused if not any(is_below(other, t) for other in self._account)]
            if not leaves:
                break
            oldest = min(leaves, key=lambda text: (self._account[text], -len(text[1])))
            del self._account[oldest]
            expected.append(before[oldest])
        assert blocks == expected
        self.evicted += len(blocks)
        return blocks

    # ------------------------------------------------------------------ operations

    def add(self, prompt: Sequence[int], salt: str = "", new: int = 8) -> Request:
        request = Request(f"r{next(self._names)}", list(prompt), greedy(new), cache_salt=salt)
        request.arrival = int(request.request_id[1:])
        self.waiting.append(request)
        return request

    def admit(self) -> bool:
        """Admit the first waiting request if memory and seats allow it. Returns whether it was admitted."""
        request, pool = self.waiting[0], self.pool
        free, tokens = pool.free_token_capacity(), len(request.token_ids)
        cost, hits = pool.cost(request, tokens), self.expected_hits(request)
        assert pool.free_token_capacity() == free, "asking costs nothing"
        fits = cost <= free and len(self.active) < SEATS
        if fits:  # its hits are in use before anything is evicted for the rest
            self._held[request.request_id] = set(self.blocks_of(request, hits))
        assert pool.reserve(request, tokens) == fits
        if not fits:
            self.refused += 1
            assert (request.slot, pool.free_token_capacity()) == (None, free)
            return False
        assert pool.free_token_capacity() == free - cost, "the charge is what it takes"
        self.active.append(self.waiting.pop(0))
        request.start_prefill()
        self.found(request, hits)
        return True

    def found(self, request: Request, hits: int) -> None:
        assert request.slot is not None
        assert (
            request.prefill_start == request.prefill_progress == self.pool.get_seq_len(request.slot) == hits
        )
        assert hits < len(request.token_ids)
        assert not request.has_begun
        self._held[request.request_id] = set(self.blocks_of(request, hits))
        self.hits += hits

    def look_again(self, request: Request) -> None:
        before, hits = request.prefill_progress, self.expected_hits(request)
        assert hits >= before
        free = self.pool.free_token_capacity()
        self.pool.match_prefix(request)
        self.found(request, hits)
        assert self.pool.free_token_capacity() >= free, "what it had reserved for them is free again"

    def chunk(self, request: Request, tokens: int, *, write: float | None = None) -> PrefillChunk:
        """Compute the next tokens of a prompt. `write` is stored instead of their ids."""
        start = request.prefill_progress
        chunk = PrefillChunk(request, start, min(start + tokens, len(request.token_ids)))
        self.write(request, chunk.start, chunk.end, write)
        return chunk

    def write(self, request: Request, start: int, end: int, value: float | None = None) -> None:
        assert request.slot is not None
        shared = {node.block for _, node in self.pool.tree.walk()}
        for index in range(start, end):
            row = column(self.pool, request.slot, index)
            assert row // self.pool.block_size not in shared, "a shared block is written"
            for layer in (*self.pool.k, *self.pool.v):
                layer.view(-1)[row] = float(request.token_ids[index]) if value is None else value

    def commit(self, chunk: PrefillChunk) -> None:
        """End a pass that succeeded: lengths grow, full blocks are registered, a whole prompt gets a token."""
        request = chunk.request
        assert request.slot is not None
        self.pool.view([Span.exact(request.slot, chunk.start, chunk.end)]).advance()
        request.prefill_progress = chunk.end
        self.register(request, chunk.end)
        if chunk.is_last:
            request.start_decode()
            request.token_ids.append(self.draw.randint(1, 2))

    def register(self, request: Request, columns: int) -> None:
        held = self._held[request.request_id]
        for text in self.blocks_of(request, columns):
            self.twins += text in self._account and text not in held
            self._account.setdefault(text, 0)
            held.add(text)
        self.pool.register_prefix(request, columns)

    def fail(self, chunk: PrefillChunk) -> None:
        """End a pass that failed after writing. None of its blocks may be registered."""
        self.pool.register_prefix(chunk.request, chunk.end)
        chunk.request.fail(RuntimeError("told to fail"))
        self.let_go(chunk.request)

    def nan(self, request: Request, tokens: int) -> None:
        """Run a pass that writes NaN and succeeds. None of its blocks may be registered."""
        chunk = self.chunk(request, tokens, write=math.nan)
        assert request.slot is not None
        self.pool.view([Span.exact(request.slot, chunk.start, chunk.end)]).advance()
        nodes = set(texts(self.pool.tree))
        self.pool.register_prefix(request, chunk.end)
        request.fail(RuntimeError("not a number"))
        self.let_go(request)
        assert set(texts(self.pool.tree)) == nodes

    def decode(self, request: Request) -> None:
        """Compute a column for the latest token. If memory is short, the latest requests are preempted."""
        while request in self.active and not self.pool.reserve(request, len(request.token_ids)):
            victim = max(self.active, key=lambda r: r.arrival)
            self.register_all(victim)
            self.let_go(victim)
            victim.preempt()
            self.waiting.insert(0, victim)
            self.preemptions += 1
        if request in self.active:
            assert request.slot is not None
            end = len(request.token_ids)
            self.write(request, end - 1, end)
            self.pool.view([Span.exact(request.slot, end - 1, end)]).advance()
            request.token_ids.append(self.draw.randint(1, 2))

    def finish(self, request: Request) -> None:
        request.cancel()
        self.register_all(request)
        self.let_go(request)

    def register_all(self, request: Request) -> None:
        """Register all computed full blocks of a sequence that leaves, in the account."""
        assert request.slot is not None
        held = self._held[request.request_id]
        for text in self.blocks_of(request, self.pool.get_seq_len(request.slot)):
            self._account.setdefault(text, 0)
            held.add(text)

    def let_go(self, request: Request) -> None:
        self.active.remove(request)
        self.pool.release(request)
        assert request.slot is None
        now = next(self._ticks)
        for text in self._held.pop(request.request_id):
            self._account[text] = now

    def reset(self) -> None:
        unused = len(self._account.keys() - self.in_use())
        assert self.pool.reset_prefix_cache() == unused
        assert self.pool.tree.evictable_count() == 0

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        pool = self.pool
        assert_consistent(pool)
        known = texts(pool.tree)
        assert set(known) == set(self._account), "what can be found is what was registered"
        store = pool.k[0].view(-1)
        for (_, ids), node in known.items():
            rows = store[node.block * pool.block_size : (node.block + 1) * pool.block_size]
            assert rows.tolist() == list(ids[-pool.block_size :]), "the tree's text is the blocks' text"
            assert node.users == sum((_, ids) in held for held in self._held.values())
        for request in self.active:
            assert request.slot is not None
            length = pool.get_seq_len(request.slot)
            seen = [store[column(pool, request.slot, c)].item() for c in range(length)]
            assert seen == request.token_ids[:length], "a sequence sees another's tokens"
            assert request.state is not RequestState.PREFILL or request.prefill_progress == length
        assert len(pool.slots) == len(self.active)
        assert 0 <= pool.used_tokens <= pool.reserved_tokens


def is_below(text: Text, above: Text) -> bool:
    return text[0] == above[0] and len(text[1]) > len(above[1]) and text[1][: len(above[1])] == above[1]


def act(sharing: Sharing) -> None:
    """Do one random operation, and check everything."""
    draw = sharing.draw
    sharing.operations += 1
    prefilling = [r for r in sharing.active if r.state is RequestState.PREFILL]
    decoding = [r for r in sharing.active if r.state is RequestState.DECODE]
    match draw.random():
        case d if d < 0.15 and len(sharing.waiting) < 4:
            length = draw.choice([1, 2, 3, 4, 5, 8, 9, 12, 13, 16])
            sharing.add(draw.choices([1, 2], weights=[8, 1], k=length), draw.choice(["", "", "a"]))
        case d if d < 0.35 and sharing.waiting:
            sharing.admit()
        case d if d < 0.6 and prefilling:
            request = draw.choice(prefilling)
            if not request.has_begun:
                sharing.look_again(request)
            sharing.commit(sharing.chunk(request, draw.randint(1, 9)))
        case d if d < 0.64 and prefilling:
            sharing.fail(sharing.chunk(draw.choice(prefilling), draw.randint(1, 9), write=GARBAGE))
        case d if d < 0.67 and prefilling:
            sharing.nan(draw.choice(prefilling), draw.randint(1, 9))
        case d if d < 0.9 and decoding:
            request = draw.choice(decoding)
            if request.num_generated_tokens < request.params.max_new_tokens:
                sharing.decode(request)
            else:
                sharing.finish(request)
        case d if d < 0.92 and sharing.active:
            sharing.finish(draw.choice(sharing.active))
        case d if d > 0.998:
            sharing.reset()
    sharing.check()


def run_down(sharing: Sharing) -> None:
    """End all requests. Then every block must be free or cached, and a reset must free the cached ones."""
    sharing.waiting.clear()
    for request in list(sharing.active):
        sharing.finish(request)
        sharing.check()
    pool = sharing.pool
    assert (pool.reserved_tokens, pool.used_tokens) == (0, 0)
    assert pool.allocator.num_free == pool.allocator.num_blocks
    sharing.reset()
    sharing.check()
    assert len(pool.allocator._free) == pool.allocator.num_blocks


# ---------------------------------------------------------------------- histories

POOLS = [(24, 1), (14, 2), (10, 3), (9, 4), (12, 4)]  # blocks, block size


def random_history(num_blocks: int, block_size: int, operations: int, seed: int) -> Sharing:
    sharing = Sharing(make_pool(num_blocks, block_size), seed)
    for _ in range(operations):
        act(sharing)
    run_down(sharing)
    return sharing


@pytest.mark.parametrize(("num_blocks", "block_size"), POOLS)
def test_10_000_operations(num_blocks: int, block_size: int) -> None:
    sharing = random_history(num_blocks, block_size, 10_000 // len(POOLS), seed=num_blocks)
    assert min(sharing.hits, sharing.evicted) > 100
    assert sharing.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "block_size"), POOLS)
def test_100_000_operations(num_blocks: int, block_size: int) -> None:
    sharing = random_history(num_blocks, block_size, 100_000 // len(POOLS), seed=block_size)
    assert min(sharing.hits, sharing.evicted) > 1000
    assert min(sharing.preemptions, sharing.twins) > 10
