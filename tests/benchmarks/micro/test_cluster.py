"""Numbers that the cluster measurements compute, and pictures that pages draw of them. No cluster is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.micro.cluster import LOSS_COLUMNS, OTHERS, ROUTING_COLUMNS, cache_use, speed, times_of
from benchmarks.results import Generator, LoadResult, RequestRecord
from benchmarks.tables import MeasuredTable
from docs.building import cluster


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
    tokens_s, ttft_s, itl_s = speed(result())
    assert tokens_s == pytest.approx(6 / 5)
    assert ttft_s == pytest.approx(1.5)
    assert itl_s == pytest.approx(1.0)


def test_hits_are_those_of_the_run_alone() -> None:
    hits, ttft_p50, ttft_p95 = cache_use(result())
    assert hits == pytest.approx(50 / 200)
    assert ttft_p50 == pytest.approx(1.5)
    assert ttft_p95 == pytest.approx(1.95)


def test_processor_time_is_told_apart_by_process() -> None:
    """A child that has a replica's name in its command line, and this process."""
    busy = "sum(range(3_000_000)); print('done', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", busy, "ray::ServeReplica:infer:replica"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        times = times_of(os.getpid())
        child.communicate(b"\n")
    assert times["replica: engine and app"] > 0
    assert times[OTHERS] > 0


def test_pictures_are_drawn_from_tables_and_say_so_where_there_are_none(tmp_path: Path) -> None:
    assert "benchmarks micro cluster_routing" in cluster.routing_picture("multi_turn", tmp_path)
    assert "benchmarks micro cluster_loss" in cluster.loss_picture(tmp_path)
    assert cluster.loss_story("killed at", results=tmp_path) == ""
    MeasuredTable(
        name="cluster_routing",
        title="t",
        columns=ROUTING_COLUMNS,
        rows=[["multi_turn", 2, "random", 40.0, 30.0, 1.0], ["multi_turn", 2, "prefix", 80.0, 20.0, 1.0]],
    ).save(tmp_path)
    MeasuredTable(
        name="cluster_loss",
        title="t",
        setup={"killed at": "1.0 s"},
        columns=LOSS_COLUMNS,
        rows=[[0.0, 100.0, 0, 2], [0.5, 50.0, 3, 1]],
    ).save(tmp_path)
    bars = cluster.routing_picture("multi_turn", tmp_path)
    assert "80%, 20 ms" in bars
    assert "2 replicas, random" in bars
    assert (
        cluster.loss_picture(tmp_path).count("<rect") == 3
    )  # two bars, one of which has answers that were cut off
    assert cluster.loss_story("killed at", results=tmp_path) == "killed at 1.0 s."
