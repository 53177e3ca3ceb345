"""The numbers that the cluster measurements compute. No cluster is started."""

from __future__ import annotations

import pytest

from benchmarks.micro.cluster import hit_rate, ttft_and_itl_s
from benchmarks.results import Generator, LoadResult
from tests.benchmarks.conftest import record


def result() -> LoadResult:
    """Return the result of two requests with three tokens each, sent at 1 and 2 s, done at 4 and 6 s."""
    records = [record(index, 1.0 + index, [2.0 + 2 * index + n for n in range(3)]) for index in range(2)]
    return LoadResult(
        origin_s=0.0,
        requests=records,
        generator=Generator(),
        telemetry_before={"counters": {"prompt_tokens": 100, "cached_tokens": 10}},
        telemetry_after={"counters": {"prompt_tokens": 300, "cached_tokens": 60}},
    )


def test_numbers_of_a_burst() -> None:
    tokens_s, ttft_p50, ttft_p95, itl_s = ttft_and_itl_s(result())
    assert tokens_s == pytest.approx(6 / 5)
    assert (ttft_p50, ttft_p95) == pytest.approx((1.5, 1.95))
    assert itl_s == pytest.approx(1.0)


def test_hits_are_those_of_the_run_alone() -> None:
    assert hit_rate(result()) == pytest.approx(50 / 200)
