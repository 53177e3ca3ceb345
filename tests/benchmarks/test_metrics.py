"""Metrics compared with values computed by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.metrics import distribution, is_good, percentiles, summarize, summarize_server
from tests.benchmarks.conftest import record


def test_a_distribution_keeps_its_ends() -> None:
    found = distribution([float(n) for n in range(10_000)])
    assert len(found.seconds) <= 300
    assert (found.seconds[0], found.seconds[-1], found.shares[-1]) == (0.0, 9999.0, 1.0)
    assert sum(seconds >= 9500 for seconds in found.seconds) > 100
    small = distribution([2.0, 1.0])
    assert (small.seconds, small.shares) == ([1.0, 2.0], [0.5, 1.0])
    assert distribution([]).shares == []


def test_percentiles_as_numpy_computes_them() -> None:
    rng = random.Random(0)
    for count in (1, 2, 3, 10, 99, 100, 101, 1000):
        values = [rng.expovariate(1) for _ in range(count)]
        found = percentiles(values)
        assert found is not None
        expected = np.percentile(values, [50, 95, 99, 100])
        assert [found.p50, found.p95, found.p99, found.max] == pytest.approx(list(expected))
        assert found.mean == pytest.approx(np.mean(values))


def test_a_run_by_hand() -> None:
    records = [
        record(0, 0.0, [0.5, 0.6, 0.7, 1.1]),  # TTFT 0.5, gaps 0.1 0.1 0.4, latency 1.1
        record(1, 1.0, [1.2, 1.3]),  # TTFT 0.2, gap 0.1, latency 0.3
        record(2, 2.0, [2.5, 9.0], error="dropped"),  # counts only as an error
        record(3, 3.0, [4.0]),  # TTFT 1.0, no gap, latency 1.0
    ]
    records[1].max_tokens = 5  # shorter than asked for
    found = summarize(records, slo_ttft_s=0.6, slo_itl_s=0.2)
    assert (found.requests, found.completed, found.errors, found.short) == (4, 3, 1, 1)
    assert found.duration_s == pytest.approx(9.0)  # until the failed request ended
    assert found.output_tokens == 7
    assert found.prompt_tokens == 300
    assert found.output_tokens_per_s == pytest.approx(7 / 9)
    assert found.requests_per_s == pytest.approx(3 / 9)
    assert found.arrival_rate == pytest.approx(1.0)
    assert found.ttft_s is not None
    assert (found.ttft_s.p50, found.ttft_s.max) == pytest.approx((0.5, 1.0))
    assert found.itl_s is not None
    assert (found.itl_s.p50, found.itl_s.max) == pytest.approx((0.1, 0.4))
    assert found.itl_s.p99 == pytest.approx(0.1 + 0.97 * 0.3)  # at place 2.97 of 0 to 3
    assert found.latency_s is not None
    assert found.latency_s.mean == pytest.approx((1.1 + 0.3 + 1.0) / 3)
    assert found.longest_stall_s == pytest.approx(0.4)
    assert found.slo_attainment == pytest.approx(0.25)  # request 0 stalls, 2 fails, 3 begins too late


def test_slo_attainment_by_hand() -> None:
    def answer(slow_gaps: int, gaps: int = 200) -> list[float]:
        times = [0.5]
        for index in range(gaps):
            times.append(times[-1] + (0.3 if index < slow_gaps else 0.1))
        return times

    assert is_good(record(0, 0.0, answer(0)), 0.5, 0.2)
    assert not is_good(record(0, 0.0, answer(0)), 0.49, 0.2)
    assert is_good(record(0, 0.0, answer(2)), 0.5, 0.2)  # two of 200: exactly 99 % are in time
    assert not is_good(record(0, 0.0, answer(3)), 0.5, 0.2)
    assert not is_good(record(0, 0.0, answer(0), error="x"), 0.5, 0.2)
    assert is_good(record(0, 0.0, [0.1]), 0.5, 0.2)  # one token has no gaps to be late


def test_all_failed() -> None:
    found = summarize([record(0, 0.0, [], error="x")], slo_ttft_s=1, slo_itl_s=1)
    assert (found.completed, found.output_tokens_per_s, found.slo_attainment) == (0, 0, 0)
    assert found.ttft_s is found.itl_s is found.latency_s is found.longest_stall_s is None


def test_the_server_by_hand() -> None:
    names = ("duration_s", "decode_tokens", "kv_used_tokens", "kv_reserved_tokens")
    steps = [
        dict(zip(names, values, strict=True))
        for values in ((0.3, 0, 100, 400), (0.1, 4, 104, 400), (0.1, 2, 106, 200))
    ]
    before = {"steps": 10, "decode_tokens": 5, "prefill_tokens": 50, "padded_tokens": 0, "idle_rows": 1}
    after = {"steps": 13, "decode_tokens": 11, "prefill_tokens": 150, "padded_tokens": 60, "idle_rows": 35}
    before |= {"preemptions": 2, "busy_s": 1.0, "prompt_tokens": 100, "cached_tokens": 90, "evictions": 1}
    after |= {"preemptions": 3, "busy_s": 1.5, "prompt_tokens": 300, "cached_tokens": 140, "evictions": 4}
    found = summarize_server(before, after, steps)
    assert (found.steps, found.preemptions, found.missing_steps) == (3, 1, 0)
    assert (found.decode_tokens, found.prefill_tokens, found.padded_tokens, found.idle_rows) == (
        6,
        100,
        60,
        34,
    )
    assert found.padded_share == pytest.approx(94 / 200)
    assert (found.cached_share, found.evictions) == (0.25, 3)
    assert found.mean_batch == pytest.approx(3.0)  # of the steps that decoded
    assert found.busy_s == pytest.approx(0.5)
    assert found.kv_used_mean == pytest.approx((30 + 10.4 + 10.6) / 0.5)  # weighted by time
    assert (found.kv_used_max, found.kv_reserved_max) == (106, 400)
    assert found.kv_reserved_mean == pytest.approx((120 + 40 + 20) / 0.5)


def test_steps_that_were_lost_are_counted() -> None:
    counters = {"steps": 50} | dict.fromkeys(
        ("decode_tokens", "prefill_tokens", "padded_tokens", "idle_rows", "preemptions"), 0
    )
    found = summarize_server({}, counters | {"busy_s": 0.0}, [])
    assert found.missing_steps == 50
    assert found.mean_batch == found.kv_used_mean == found.padded_share == 0


def test_a_file_gives_the_same_numbers_as_the_run_that_wrote_it() -> None:
    rng = random.Random(1)
    raw = record(0, rng.random(), sorted(1 + rng.random() for _ in range(50)))
    kept = raw.rounded()
    again = type(kept).model_validate_json(kept.model_dump_json())
    assert summarize([again], slo_ttft_s=1, slo_itl_s=1) == summarize([kept], slo_ttft_s=1, slo_itl_s=1)
    assert kept.token_times_s == pytest.approx(raw.token_times_s, abs=0.6e-5)
