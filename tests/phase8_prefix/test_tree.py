"""The tree alone: matching, the order of eviction, and the amount of work."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

import pytest

from phase8_prefix.tree import Node, PrefixTree

BLOCK = 2  # tokens


def blocks(path: list[Node]) -> list[int]:
    return [node.block for node in path]


def tree_of(*texts: list[int]) -> PrefixTree:
    """Return a tree with these texts, which no request uses. Blocks are numbered in the order of insertion."""
    tree = PrefixTree(BLOCK)
    named = 0
    for text in texts:
        count = len(text) // BLOCK
        tree.release(tree.insert(text, range(named, named + count)))
        named += count
    return tree


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ([1, 2, 3, 4, 5, 6], [0, 1, 2]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2]),
        ([1, 2, 3, 4, 5], [0, 1]),
        ([1, 2, 3, 4, 6, 5], [0, 1]),
        ([1, 2, 4, 3, 5, 6], [0]),
        ([2, 1, 3, 4], []),
        ([3, 4], []),
        ([1], []),
        ([], []),
    ],
)
def test_the_longest_path_of_whole_blocks_matches(text: list[int], found: list[int]) -> None:
    assert blocks(tree_of([1, 2, 3, 4, 5, 6]).match(text)) == found


def test_texts_share_what_they_begin_with() -> None:
    tree = tree_of([1, 2, 3, 4], [1, 2, 5, 6])
    assert blocks(tree.match([1, 2, 3, 4])) == [0, 1]
    assert blocks(tree.match([1, 2, 5, 6])) == [0, 3], "the older block stays, the newcomer's was not taken"
    assert sorted((depth, node.block) for depth, node in tree.walk()) == [(0, 0), (1, 1), (1, 3)]


def test_a_match_continues_below_held_nodes() -> None:
    tree = tree_of([1, 2, 3, 4, 5, 6])
    held = tree.match([1, 2, 3])
    assert blocks(tree.match([1, 2, 3, 4, 5, 6], held=held)) == [1, 2]
    assert tree.match([1, 2, 9, 9], held=held) == []
    assert blocks(tree.insert([1, 2, 7, 8], [9], held=held)) == [9]
    assert blocks(tree.match([1, 2, 7, 8])) == [0, 9]


def test_blocks_in_use_are_not_evicted() -> None:
    tree = PrefixTree(1)
    a, b = tree.insert([1, 2, 3], [0, 1, 2]), tree.insert([1, 2, 4], [7, 8, 3])
    assert (blocks(b), [node.users for node in b]) == ([0, 1, 3], [2, 2, 1])
    assert tree.evict(9) == []
    tree.release(a)
    assert tree.evictable_count() == 1
    assert tree.evict(9) == [2]
    tree.release(b)
    assert tree.evict(9) == [3, 1, 0], "leaves first; a parent that becomes one goes in the same call"
    assert list(tree.walk()) == []


def test_the_least_recently_used_goes_first() -> None:
    tree = tree_of([1, 1], [2, 2], [3, 3])
    path = tree.match([1, 1])
    tree.hold(path)
    tree.release(path)
    assert tree.evict(2) == [1, 2]
    assert blocks(tree.match([1, 1])) == [0]
    assert tree.evict(0) == tree.evict(-3) == []


def test_the_work_is_in_the_blocks_named_not_in_the_tree() -> None:
    """No operation searches the unused nodes: they are added at one end, taken from the other, or found by key."""

    class Ends(OrderedDict[Any, Any]):
        def __iter__(self) -> NoReturn:
            raise AssertionError("searched")

        items = keys = values = __iter__  # type: ignore[assignment]

    tree = tree_of(*([i, i + 1, 2 * i, 7] for i in range(50)))
    tree._unused = Ends(tree._unused)
    path = tree.match([20, 21, 40, 7])
    tree.hold(path)
    tree.release(path)
    assert tree.evict(5) == [1, 0, 3, 2, 5]
    assert isinstance(tree._unused, Ends)
