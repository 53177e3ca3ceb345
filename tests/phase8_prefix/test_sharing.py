"""Who holds what, under any history; and checks that catch the mistakes there are to make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.request import Request, RequestState
from phase8_prefix.cache import PrefixCachingPool
from phase8_prefix.tree import Key, Node, PrefixTree
from tests.phase8_prefix.support import GARBAGE, Sharing, act, make_pool, run_down

POOLS = [(24, 1), (14, 2), (10, 3), (9, 4), (12, 4)]  # blocks, block size


class SharingMachine(RuleBasedStateMachine):
    """Hypothesis chooses the operations, and the shortest ones that go wrong."""

    operations = 0

    @initialize(blocks=st.integers(4, 24), block_size=st.integers(1, 5), seed=st.integers(0, 9))
    def start(self, blocks: int, block_size: int, seed: int) -> None:
        self.sharing = Sharing(make_pool(blocks, block_size), seed)

    def requests(self, *states: RequestState) -> list[Request]:
        return [r for r in self.sharing.active if r.state in states]

    def prefilling(self) -> bool:
        return bool(self.requests(RequestState.PREFILL))

    @rule(prompt=st.lists(st.integers(1, 2), min_size=1, max_size=12), salt=st.sampled_from(["", "a"]))
    def add(self, prompt: list[int], salt: str) -> None:
        limit = self.sharing.pool.max_request_tokens() - 1
        self.sharing.add(prompt[:limit], salt)

    @precondition(lambda self: self.sharing.waiting)
    @rule()
    def admit(self) -> None:
        self.sharing.admit()

    @precondition(prefilling)
    @rule(choice=st.integers(0, 9), tokens=st.integers(1, 9), end=st.sampled_from(["well", "ill", "nan"]))
    def chunk(self, choice: int, tokens: int, end: str) -> None:
        prefilling = self.requests(RequestState.PREFILL)
        request = prefilling[choice % len(prefilling)]
        if not request.has_begun:
            self.sharing.look_again(request)
        if end == "nan":
            self.sharing.nan(request, tokens)
        elif end == "ill":
            self.sharing.fail(self.sharing.chunk(request, tokens, write=GARBAGE))
        else:
            self.sharing.commit(self.sharing.chunk(request, tokens))

    @precondition(lambda self: self.requests(RequestState.DECODE))
    @rule(choice=st.integers(0, 9), steps=st.integers(1, 4))
    def decode(self, choice: int, steps: int) -> None:
        decoding = self.requests(RequestState.DECODE)
        request = decoding[choice % len(decoding)]
        for _ in range(steps):
            if request.slot is not None and len(request.token_ids) <= self.sharing.pool.max_request_tokens():
                self.sharing.decode(request)

    @precondition(lambda self: self.sharing.active)
    @rule(choice=st.integers(0, 9))
    def finish(self, choice: int) -> None:
        self.sharing.finish(self.sharing.active[choice % len(self.sharing.active)])

    @rule()
    def reset(self) -> None:
        self.sharing.reset()

    @invariant()
    def everything_holds(self) -> None:
        type(self).operations += 1
        self.sharing.check()

    def teardown(self) -> None:
        run_down(self.sharing)


def test_any_history() -> None:
    SharingMachine.operations = 0
    run_state_machine_as_test(
        SharingMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert SharingMachine.operations > 2000


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


# ---------------------------------------------------------------------- mistakes, each of which must be caught


class ReferenceDroppedEarly(PrefixTree):
    """A hit is not counted."""

    def hold(self, path: Iterable[Node]) -> None:
        nodes = list(path)
        super().hold(nodes)
        self.release(nodes)


class ReferenceKept(PrefixTree):
    """Who leaves forgets its last node."""

    def release(self, path: Sequence[Node]) -> None:
        super().release(path[:-1])


class ParentBeforeChild(PrefixTree):
    """A path is let go from its start."""

    def release(self, path: Sequence[Node]) -> None:
        super().release(path[::-1])


class LatestFirst(PrefixTree):
    """What was used last is evicted first."""

    def evict(self, count: int) -> list[int]:
        self._unused = type(self._unused)(reversed(self._unused.items()))
        return super().evict(count)


class SaltIgnored(PrefixTree):
    def _keys(self, token_ids: Sequence[int], salt: str, first: int) -> Iterator[Key]:
        return super()._keys(token_ids, "", first)


class HashOnly(PrefixTree):
    """Texts are the same if they have the same sum."""

    def _keys(self, token_ids: Sequence[int], salt: str, first: int) -> Iterator[Key]:
        for key in super()._keys(token_ids, salt, first):
            ids = [each for each in key if isinstance(each, int)]
            yield (*key[: len(key) - len(ids)], *sorted(ids))


class NewcomerUncounted(PrefixTree):
    """Who inserts what is there already does not hold it."""

    def insert(self, *args: Any) -> list[Node]:
        known = {node: node.users for _, node in self.walk()}
        path = super().insert(*args)
        self.release([node for node in path if node in known])
        return path


class UncommittedInserted(PrefixCachingPool):
    """A pass that has failed registers what it should have computed."""

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
    """A hit that nobody holds is not paid for, and counts as free, too."""

    def cost(self, request: Request, tokens: int) -> int:
        return self.blocks_for(tokens) * self.block_size - len(self._match(request, ())) * self.block_size


class LastTokenFound(PrefixCachingPool):
    """Nothing is left to compute."""

    def _match(self, request: Request, held: Sequence[Node]) -> list[Node]:
        return self.tree.match(request.token_ids, request.cache_salt, held)


class UnsoundInserted(PrefixCachingPool):
    """What was written is not looked at."""

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
    """By what must hold, or by what stumbles over it later; in a history like those above."""
    if issubclass(mistake, PrefixTree):
        monkeypatch.setattr("phase8_prefix.cache.PrefixTree", mistake)
    else:
        monkeypatch.setattr("tests.phase8_prefix.support.PrefixCachingPool", mistake)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        histories()
