"""The program that measures the prefix cache's books: it measures what it says, and leaves the tree as it was."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import benchmarks.__main__ as command_line
from benchmarks.micro import prefix_tree
from benchmarks.tables import load_tables


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "PROMPT_TOKENS", 64)
    monkeypatch.setattr(prefix_tree, "ROUNDS", 3)


def test_the_tree_has_the_size_asked_for_and_keeps_it() -> None:
    rng = random.Random(0)
    tree = prefix_tree.grown_tree(prefix_tree.make_pool("zoo:llama-tiny").tree, 103, rng)
    assert len(list(tree.walk())) == 103
    rounds = prefix_tree.tree_times(tree, rng)
    assert [set(each) for each in rounds] == [set(prefix_tree.PARTS) - {"look"}] * 3
    assert len(list(tree.walk())) == tree.evictable_count() == 103


def test_looking_leaves_nothing_behind() -> None:
    pool = prefix_tree.make_pool("zoo:llama-tiny")
    assert len(prefix_tree.look_times(pool, random.Random(0))) == 3
    assert list(pool.tree.walk()) == []
    assert pool.audit_blocks() == set()


def test_the_table_has_a_line_for_each_size(tmp_path: Path) -> None:
    command_line.main(
        ["micro", "prefix_tree", "--nodes", "10", "20", "--model", "zoo:llama-tiny", "--out", str(tmp_path)]
    )
    [table] = load_tables(tmp_path)
    assert (table.name, [row[0] for row in table.rows]) == ("prefix_tree", [10, 20])
