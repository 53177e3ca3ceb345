"""Numbers that the cluster measurements compute, and pictures that pages draw of them. No cluster is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.micro.cluster import ROUTING_COLUMNS, hit_rate, ttft_and_itl_s
from benchmarks.results import Generator, LoadResult, RequestRecord
from benchmarks.tables import MeasuredTable
from docs.building import charts


def result() -> LoadResult:
    """Two requests of three tokens each; sent at 1 and 2 s, done at 5 and 6 s."""
    records = [
        RequestRecord(
            index=index,
            scheduled_s=0.0,
            prompt_tokens=10,
            max_tokens=3,
            sent_s=1.0 + index,
            token_times_s=[2.0 + 2 * index, 3.0 + 2 * index, 4.0 + 2 * index],
            finished_s=5.0 + index,
            completion_tokens=3,
        )
        for index in range(2)
    ]
    counters = {"prompt_tokens": 100, "cached_tokens": 10}
    later = {"prompt_tokens": 300, "cached_tokens": 60}
    return LoadResult(
        origin_s=0.0,
        requests=records,
        generator=Generator(),
        telemetry_before={"counters": counters},
        telemetry_after={"counters": later},
    )


def test_numbers_of_a_burst() -> None:
    tokens_s, ttft_p50, ttft_p95, itl_s = ttft_and_itl_s(result())
    assert tokens_s == pytest.approx(6 / 5)
    assert (ttft_p50, ttft_p95) == pytest.approx((1.5, 1.95))
    assert itl_s == pytest.approx(1.0)


def test_hits_are_those_of_the_run_alone() -> None:
    assert hit_rate(result()) == pytest.approx(50 / 200)


def test_a_picture_is_drawn_from_the_table_and_says_so_where_there_is_none(tmp_path: Path) -> None:
    assert "benchmarks micro cluster_routing" in charts.routing_picture("multi_turn", tmp_path)
    MeasuredTable(
        name="cluster_routing",
        title="t",
        columns=ROUTING_COLUMNS,
        rows=[["multi_turn", 2, "random", 40.0, 30.0, 1.0], ["multi_turn", 2, "prefix", 80.0, 20.0, 1.0]],
    ).save(tmp_path)
    bars = charts.routing_picture("multi_turn", tmp_path)
    assert "80%, 20 ms" in bars
    assert "2 replicas, random" in bars
