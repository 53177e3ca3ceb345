"""Clusters of a phase: their cost beside a plain server, and the gain of routing by prefix.

All requests are sent over HTTP. Each engine computes with one thread. Needs Ray (the extra `cluster`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import httpx

from benchmarks.calibrate import warmup_requests
from benchmarks.loadgen import run_whole_load
from benchmarks.metrics import summarize
from benchmarks.micro import medians, say, writer_for
from benchmarks.results import LoadResult
from benchmarks.servers import RunningServer, Target, find_phase_module
from benchmarks.tables import Cell, MeasuredTable
from benchmarks.workloads import WORKLOADS, build, identical_requests

THREADS = 1  # compute threads of an engine
SEATS, PROMPT_TOKENS, NEW_TOKENS, BURST = 16, 128, 128, 64  # for `cost`, which sends `BURST` requests at once
MAX_SEQ_LEN = 2 * (PROMPT_TOKENS + NEW_TOKENS)
ROUTING_WORKLOADS = ("prefix_caching", "multi_turn")
ROUTING_COLUMNS = ["workload", "replicas", "routing", "hit rate, %", "TTFT p50, ms", "TTFT p95, ms"]


def plain_target(phase: str, model: str) -> Target:
    """Return how to start a phase as a plain server."""
    return Target("plain server", 0, find_phase_module(phase), _options(model, SEATS, MAX_SEQ_LEN))


def cluster_target(
    phase: str,
    model: str,
    replicas: int,
    *,
    seats: int = SEATS,
    max_seq_len: int = MAX_SEQ_LEN,
    routing: str = "auto",
) -> Target:
    """Return how to start a cluster of a phase. There may be more replicas than cores: Ray reserves a quarter of a
    core for each."""
    options = {
        "phase": phase,
        "replicas": str(replicas),
        "routing": routing,
        "cpus": "0.25",
        "threads": str(THREADS),
    }
    label = f"cluster of {replicas}"
    return Target(label, replicas, "cluster", options | _options(model, seats, max_seq_len))


def _options(model: str, seats: int, max_seq_len: int) -> dict[str, str]:
    return {
        "model": model,
        "port": "0",
        "max-batch-size": str(seats),
        "max-seq-len": str(max_seq_len),
        "max-waiting-requests": "128",
        "log-level": "info",
    }


def setup_of(phase: str, seats: int, **facts: str) -> dict[str, str]:
    """Return the conditions of a measurement, which its table lists as its setup."""
    engine = {"seats of an engine": str(seats), "threads of an engine": str(THREADS)}
    return {"phase": find_phase_module(phase), **facts, **engine, "cores": str(os.cpu_count())}


def ttft_and_itl_s(result: LoadResult) -> tuple[float, float, float, float]:
    """Return output tokens a second, and in seconds the p50 of TTFT, the p95 of TTFT and the p50 of ITL."""
    metrics = summarize(result.requests, slo_ttft_s=float("inf"), slo_itl_s=float("inf"))
    assert metrics.ttft_s is not None
    assert metrics.itl_s is not None
    return metrics.output_tokens_per_s, metrics.ttft_s.p50, metrics.ttft_s.p95, metrics.itl_s.p50


def hit_rate(result: LoadResult) -> float:
    """Return the share of the run's prompt tokens that were found in a cache."""
    assert result.telemetry_before is not None
    assert result.telemetry_after is not None
    before, after = result.telemetry_before["counters"], result.telemetry_after["counters"]
    found, looked_for = (after[name] - before[name] for name in ("cached_tokens", "prompt_tokens"))
    return float(found / looked_for)


def cost(
    phase: str = "8", models: tuple[str, ...] = ("zoo:llama-tiny",), turns: int = 3
) -> Iterator[MeasuredTable]:
    """Send the same burst to a plain server, to a cluster of one replica, and of two.

    Args:
        phase: number, word or module
        turns: runs of each server; medians are shown
    """
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # for the plain server; replicas get --threads
    burst = f"{BURST} requests, prompts and answers of {PROMPT_TOKENS} and {NEW_TOKENS} tokens"
    yield MeasuredTable(
        name="cluster_cost",
        title="the same burst to a plain server and to a cluster",
        setup=setup_of(phase, SEATS, burst=burst) | {"median of": f"{turns} turns"},
        columns=[
            *("model", "server", "output tokens / s", "of the plain server's"),
            *("TTFT p50, ms", "ITL p50, ms"),
        ],
        rows=[row for model in models for row in cost_rows(phase, model, turns)],
    )


def cost_rows(phase: str, model: str, turns: int) -> list[list[Cell]]:
    """Measure a plain server, a cluster of one replica and a cluster of two, in turns. Return a row of medians for
    each."""
    targets = [plain_target(phase, model), *(cluster_target(phase, model, n) for n in (1, 2))]
    writer = writer_for(model)
    found: dict[str, list[tuple[float, ...]]] = {target.label: [] for target in targets}
    for turn, target in itertools.product(range(1, turns + 1), targets):
        requests = identical_requests(
            writer, count=BURST, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, seed=f"cost:{turn}"
        )
        with RunningServer(target) as server:
            result = run_whole_load(server.endpoint, requests, warmup_requests(writer) * 2)
        found[target.label].append(ttft_and_itl_s(result))
        say(f"{model}, turn {turn}, {target.label}: {found[target.label][-1][0]:,.0f} tokens/s")
    middle = {label: medians(each) for label, each in found.items()}
    plain = middle[targets[0].label][0]
    return [
        [model, label, tokens_s, tokens_s / plain, ttft_s * 1e3, itl_s * 1e3]
        for label, (tokens_s, ttft_s, _, itl_s) in middle.items()
    ]


def routing(
    phase: str = "8",
    model: str = "zoo:llama-tiny",
    replicas: tuple[int, ...] = (1, 2, 4),
    rate: float = 1.0,
    turns: int = 3,
) -> Iterator[MeasuredTable]:
    """Send prompts with shared prefixes, and chats, to clusters that route by prefix and at random.

    Args:
        phase: number, word or module
        rate: factor on the workload's rate
        turns: number of seeds; medians are shown
    """
    length = max(WORKLOADS[name].longest for name in ROUTING_WORKLOADS)
    rows: list[list[Cell]] = []
    for count, policy in itertools.product(replicas, ("random", "prefix")):
        target = cluster_target(phase, model, count, seats=8, max_seq_len=length, routing=policy)
        for name, hits, ttft_p50, ttft_p95 in cache_uses(target, model, rate, turns):
            rows.append([name, count, policy, hits * 100, ttft_p50 * 1e3, ttft_p95 * 1e3])
            say(f"{name}, {count} replicas, {policy}: {hits:.0%}, {ttft_p50 * 1e3:.0f} ms")
    rows.sort(key=lambda row: ROUTING_WORKLOADS.index(str(row[0])))
    setup = setup_of(phase, 8, model=model, arrivals=f"{rate:g} × the table's")
    yield MeasuredTable(
        name="cluster_routing",
        title="routing by prefix against random routing",
        setup=setup | {"caches": "emptied before each run", "median of": f"{turns} seeds"},
        columns=ROUTING_COLUMNS,
        rows=rows,
    )


def cache_uses(
    target: Target, model: str, rate: float, turns: int
) -> Iterator[tuple[str, float, float, float]]:
    """Yield each workload's name, hit rate, TTFT p50 and TTFT p95 (in seconds): medians over `turns` seeds.

    One cluster serves all runs. Its caches are emptied before each run.
    """
    writer = writer_for(model)
    with RunningServer(target) as server, httpx.Client(base_url=server.url, timeout=30.0) as client:
        for name in ROUTING_WORKLOADS:
            runs = []
            for seed in range(turns):
                client.post("/reset_prefix_cache", json={}).raise_for_status()
                requests = build(WORKLOADS[name], writer, seed=seed, factor=rate)
                result = run_whole_load(server.endpoint, requests, warmup_requests(writer))
                _, ttft_p50, ttft_p95, _ = ttft_and_itl_s(result)
                runs.append((hit_rate(result), ttft_p50, ttft_p95))
            hits, ttft_p50, ttft_p95 = medians(runs)
            yield name, hits, ttft_p50, ttft_p95
