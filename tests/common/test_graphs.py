"""Graphs for every number of seats, on stand-ins."""

from __future__ import annotations

import torch
from torch import Tensor

from phase9_pipelined.config import MOST_ROWS, graph_sizes
from tests.support.streams import StandIns


def double(rows: Tensor) -> tuple[Tensor, ...]:
    return 2 * rows, rows.sum(1)


def rows_of(count: int, start: int) -> Tensor:
    return torch.arange(start, start + 2 * count).view(count, 2)


def assert_doubled(graphs: StandIns, count: int, start: int) -> None:
    rows = rows_of(count, start)
    doubled, sums = graphs.run("double", double, [rows])
    assert torch.equal(doubled, 2 * rows)
    assert torch.equal(sums, rows.sum(1))


def test_every_number_of_seats_has_graphs_for_each_of_its_batches() -> None:
    """Graphs are captured once, the largest first. Each batch then runs in the smallest graph that fits it."""
    for seats in (*range(1, 41), 63, 64, 65, 100, MOST_ROWS - 1, MOST_ROWS):
        sizes = graph_sizes(seats)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == seats
        graphs = StandIns(sizes)
        for size in reversed(sizes):
            assert_doubled(graphs, size, start=size)
        assert graphs.captured_rows == sizes[::-1]
        for count in {1, seats, *(size + 1 for size in sizes[:-1]), *(size - 1 for size in sizes[1:])}:
            assert_doubled(graphs, count, start=7 * count)
            assert graphs.size_for("double", count) == min(size for size in sizes if size >= count)
        assert graphs.captured_rows == sizes[::-1], "no batch is captured while clients wait"


def test_a_failed_capture_disables_its_size_alone() -> None:
    broken = {4}
    graphs = StandIns([2, 4, 8], fails=broken.__contains__)
    for count in (2, 3, 4, 8, 4, 2):
        assert_doubled(graphs, count, start=count)
    assert graphs.captured_rows == [2, 4, 8]
    assert graphs.failed == {("double", 4)}
    assert [graphs.size_for("double", rows) for rows in (2, 3, 4, 8)] == [2, 8, 8, 8]
    assert graphs.size_for("other", 3) == 4, "a function of its own"
    broken.clear()
    graphs.clear()
    assert_doubled(graphs, 3, start=0)
    assert not graphs.failed
    assert graphs.captured_rows == [2, 4, 8, 4]
