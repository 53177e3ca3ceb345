"""Exercise: an eviction policy that keeps shared blocks in the cache, even if many long prompts are sent once each.

Write `KeepWhatWasHit`, then run `.venv/bin/pytest docs/exercises/keep_what_was_hit.py`.
The check runs it without a model, and looks which blocks are left after ten long prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from phase8_prefix.tree import Node, PrefixTree


class KeepWhatWasHit(PrefixTree):
    """Phase 8's prefix tree, but nodes that were never hit are evicted before any node that was hit.

    A node is a cached block. `hold` is called with the nodes that a request hit. `self._unused` has the nodes that
    no request uses, in the order in which they are evicted. You may change that order, but a node must come after
    the nodes below it.
    """

    def evict(self, count: int) -> list[int]:
        return super().evict(count)  # least recently used first


# ---------------------------------------------------------------------- the check

SYSTEM = [1, 2, 3, 4]


def serve(tree: PrefixTree, text: list[int], blocks: range) -> int:
    """Serve a request with the tokens `text` to its end. Returns the number of blocks that it hit.

    Tokens that were not in the tree are stored in blocks from `blocks`.
    """
    hits = tree.match(text)
    tree.hold(hits)
    path = [*hits, *tree.insert(text, blocks[len(hits) :], held=hits)]
    tree.release(path)
    return len(hits)


def flooded(evict: int) -> tuple[PrefixTree, list[int]]:
    """Serve two requests that begin alike and ten long requests with nothing in common, then evict blocks.

    Returns the tree and the evicted blocks. `evict` is the number of blocks to evict.
    """
    tree = KeepWhatWasHit(block_size=2)
    assert serve(tree, [*SYSTEM, 5, 5], range(100, 103)) == 0
    assert serve(tree, [*SYSTEM, 6, 6], range(200, 203)) == 2
    for number in range(10):
        assert serve(tree, [50 + number, *[number] * 9], range(10 * number, 10 * number + 5)) == 0
    return tree, tree.evict(evict)


def test_what_was_hit_survives_a_flood() -> None:
    tree, _ = flooded(evict=50)
    assert [node.block for node in tree.match(SYSTEM)] == [100, 101]


@pytest.mark.parametrize("count", [1, 7, 30, 52])
def test_so_many_go_as_were_asked_for_and_leaves_first(count: int) -> None:
    tree, blocks = flooded(evict=count)
    assert len(set(blocks)) == len(blocks) == count
    left = [node for _, node in tree.walk()]
    assert len(left) == 2 + 2 + 50 - count, "a node whose parent is gone can never be found again"
    assert tree.evictable_count() == len(left)


def test_everything_goes_in_the_end_and_nothing_that_is_used() -> None:
    tree, _ = flooded(evict=0)
    held = tree.match(SYSTEM)
    tree.hold(held)
    assert len(tree.evict(1000)) == 52
    tree.release(held)
    assert sorted(tree.evict(1000)) == [100, 101]
    assert list(tree.walk()) == []


# ---------------------------------------------------------------------- one way to solve it


class Solution(PrefixTree):
    """Blocks that were never hit are evicted first. A block that was hit once stays for long, needed or not."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._hit: set[Node] = set()

    def hold(self, path: Iterable[Node]) -> None:
        nodes = list(path)
        self._hit.update(nodes)
        super().hold(nodes)

    def release(self, path: Sequence[Node]) -> None:
        super().release(path)
        for node in path:  # the path's last node is moved last, so it is evicted first
            if node.users == 0 and node not in self._hit:
                self._unused.move_to_end(node, last=False)

    def evict(self, count: int) -> list[int]:
        blocks = super().evict(count)
        self._hit.intersection_update(node for _, node in self.walk())
        return blocks
