"""Block ids: allocated once, freed once, never lost."""

from __future__ import annotations

import pytest

from phase6_paged.allocator import BlockAllocator, OutOfBlocksError


def allocator_of(blocks: int) -> BlockAllocator[str]:
    return BlockAllocator(blocks)


def state(allocator: BlockAllocator[str]) -> tuple[list[int], dict[int, str]]:
    return list(allocator._free), dict(allocator._owners)


def test_every_block_is_given_out_once() -> None:
    allocator = allocator_of(8)
    blocks = allocator.allocate(3, "a") + allocator.allocate(5, "b")
    assert sorted(blocks) == list(range(8))
    assert (allocator.num_free, allocator.num_allocated) == (0, 8)


def test_exhaustion_leaves_no_trace() -> None:
    allocator = allocator_of(4)
    allocator.allocate(3, "a")
    before = state(allocator)
    assert not allocator.can_allocate(2)
    with pytest.raises(OutOfBlocksError):
        allocator.allocate(2, "b")
    assert state(allocator) == before, "all or nothing"
    assert len(allocator.allocate(1, "b")) == 1


def test_a_negative_count_is_refused() -> None:
    allocator = allocator_of(4)
    before = state(allocator)
    with pytest.raises(ValueError):  # noqa: PT011 - the message is free, for learners
        allocator.allocate(-1, "a")
    assert state(allocator) == before


@pytest.mark.parametrize(
    "wrong",
    [[0, 0], [1, 0, 1], [3], [0, 3], [3, 0], [4], [0, 99], [-1], [0, 1, 2, 3]],
    ids=["twice", "twice-apart", "free", "held-then-free", "free-then-held", "unknown", "held-then-unknown",
         "negative", "all"],
)  # fmt: skip
def test_freeing_what_is_not_allocated_changes_nothing(wrong: list[int]) -> None:
    allocator = allocator_of(4)
    assert allocator.allocate(3, "a") == [0, 1, 2]
    before = state(allocator)
    with pytest.raises(ValueError):  # noqa: PT011 - the message is free, for learners
        allocator.free(wrong)
    assert state(allocator) == before


def test_a_double_free_is_refused() -> None:
    allocator = allocator_of(4)
    blocks = allocator.allocate(2, "a")
    allocator.free(blocks)
    with pytest.raises(ValueError):  # noqa: PT011 - the message is free, for learners
        allocator.free(blocks)
    assert allocator.num_free == 4
    assert sorted(allocator.allocate(4, "b")) == [0, 1, 2, 3], "no block is in the free list twice"


def test_force_free_takes_what_is_allocated_and_says_how_many() -> None:
    allocator = allocator_of(4)
    allocator.allocate(3, "a")
    assert allocator.force_free([0, 0, 3, 99, 2]) == 2
    assert allocator.allocated_block_ids() == {1}
    assert allocator.force_free([0, 2]) == 0
    assert sorted(allocator._free) == [0, 2, 3]
    assert allocator.find_leaked_blocks([]) == {"a": {1}}
