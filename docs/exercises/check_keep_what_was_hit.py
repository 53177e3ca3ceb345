"""Runs `KeepWhatWasHit` on integers alone: what is left after a flood?"""

from __future__ import annotations

import pytest
from keep_what_was_hit import KeepWhatWasHit

from phase8_prefix.tree import PrefixTree

SYSTEM = [1, 2, 3, 4]


def serve(tree: PrefixTree, text: list[int], blocks: range) -> int:
    """A request from its admission to its end: how many blocks it found."""
    hits = tree.match(text)
    tree.hold(hits)
    path = [*hits, *tree.insert(text, blocks[len(hits) :], held=hits)]
    tree.release(path)
    return len(hits)


def flooded(evict: int) -> tuple[PrefixTree, list[int]]:
    """A prompt that two requests begin with, ten long ones that nobody sends again, and then memory is needed."""
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
