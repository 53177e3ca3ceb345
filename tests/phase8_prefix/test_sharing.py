"""Shared blocks in random histories, and proof that the checks catch typical mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from common.request import Request
from phase8_prefix.cache import PrefixCachingPool
from phase8_prefix.tree import Key, Node, PrefixTree
from tests.phase8_prefix.support import Sharing, act, make_pool, run_down

POOLS = [(24, 1), (14, 2), (10, 3), (9, 4), (12, 4)]  # blocks, block size


def random_history(num_blocks: int, block_size: int, operations: int, seed: int) -> Sharing:
    sharing = Sharing(make_pool(num_blocks, block_size), seed)
    for _ in range(operations):
        act(sharing)
    run_down(sharing)
    return sharing


def histories() -> None:
    for seed, (num_blocks, block_size) in enumerate(POOLS):
        random_history(num_blocks, block_size, 2000, seed)


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


# ---------------------------------------------------------------------- mistakes that must be caught


class ReferenceDroppedEarly(PrefixTree):
    """A hit is not counted."""

    def hold(self, path: Iterable[Node]) -> None:
        nodes = list(path)
        super().hold(nodes)
        self.release(nodes)


class ReferenceKept(PrefixTree):
    """A sequence that leaves does not release its last node."""

    def release(self, path: Sequence[Node]) -> None:
        super().release(path[:-1])


class ParentBeforeChild(PrefixTree):
    """A path is released from its root, not from its leaf."""

    def release(self, path: Sequence[Node]) -> None:
        super().release(path[::-1])


class LatestFirst(PrefixTree):
    """The node that was used last is evicted first."""

    def evict(self, count: int) -> list[int]:
        self._unused = type(self._unused)(reversed(self._unused.items()))
        return super().evict(count)


class SaltIgnored(PrefixTree):
    def _keys(self, token_ids: Sequence[int], salt: str, first: int) -> Iterator[Key]:
        return super()._keys(token_ids, "", first)


class HashOnly(PrefixTree):
    """Blocks with the same tokens in another order count as equal."""

    def _keys(self, token_ids: Sequence[int], salt: str, first: int) -> Iterator[Key]:
        for key in super()._keys(token_ids, salt, first):
            ids = [each for each in key if isinstance(each, int)]
            yield (*key[: len(key) - len(ids)], *sorted(ids))


class NewcomerUncounted(PrefixTree):
    """A sequence that inserts an existing node does not hold it."""

    def insert(self, *args: Any) -> list[Node]:
        known = {node: node.users for _, node in self.walk()}
        path = super().insert(*args)
        self.release([node for node in path if node in known])
        return path


class UncommittedInserted(PrefixCachingPool):
    """A failed pass registers the blocks that it should have computed."""

    def register_prefix(self, request: Request, columns: int) -> None:
        assert request.slot is not None
        length = self._lengths[request.slot]
        self._lengths[request.slot] = columns
        super().register_prefix(request, columns)
        self._lengths[request.slot] = length


class HalfABlockInserted(PrefixCachingPool):
    """The last block is registered before it is full."""

    def register_prefix(self, request: Request, columns: int) -> None:
        assert request.slot is not None
        length = self._lengths[request.slot]
        self._lengths[request.slot] = min(length + 1, len(request.token_ids))
        super().register_prefix(request, columns + 1)
        self._lengths[request.slot] = length


class CountedTwice(PrefixCachingPool):
    """A hit on an unused block is not charged, although the block counts as free, too."""

    def cost(self, request: Request, tokens: int) -> int:
        return self.blocks_for(tokens) * self.block_size - len(self._match(request, ())) * self.block_size


class LastTokenFound(PrefixCachingPool):
    """The last token of a prompt may be a hit, so no token is left to compute."""

    def _match(self, request: Request, held: Sequence[Node]) -> list[Node]:
        return self.tree.match(request.token_ids, request.cache_salt, held)


class UnsoundInserted(PrefixCachingPool):
    """Written keys and values are not checked for NaN."""

    def register_prefix(self, request: Request, columns: int) -> None:
        keys, self.k = self.k, [layer.nan_to_num() for layer in self.k]
        values, self.v = self.v, [layer.nan_to_num() for layer in self.v]
        super().register_prefix(request, columns)
        self.k, self.v = keys, values


TREES = [
    ReferenceDroppedEarly,
    ReferenceKept,
    ParentBeforeChild,
    LatestFirst,
    SaltIgnored,
    HashOnly,
    NewcomerUncounted,
]
SHARING_POOLS = [UncommittedInserted, HalfABlockInserted, CountedTwice, LastTokenFound, UnsoundInserted]


@pytest.mark.parametrize("mistake", [*TREES, *SHARING_POOLS], ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_caught(mistake: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """In random histories, the checks fail, or later operations raise."""
    if issubclass(mistake, PrefixTree):
        monkeypatch.setattr("phase8_prefix.cache.PrefixTree", mistake)
    else:
        monkeypatch.setattr("tests.phase8_prefix.support.PrefixCachingPool", mistake)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        histories()
