"""A cluster's cost beside a plain server, and the gain of routing by prefix.

All over HTTP. A replica computes with one thread, and so does the plain server. Needs Ray (the extra `cluster`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from collections.abc import Iterator

import httpx
import psutil
from rich.console import Console

from benchmarks.calibrate import warmup_requests
from benchmarks.metrics import percentile
from benchmarks.micro.cluster_servers import THREADS, cluster_target, load, plain_target
from benchmarks.results import LoadResult
from benchmarks.servers import RunningServer, Target, find_phase_module
from benchmarks.tables import Cell, MeasuredTable
from benchmarks.workloads import WORKLOADS, PromptWriter, build, identical_requests
from common.models.registry import open_checkpoint

SEATS, PROMPT_TOKENS, NEW_TOKENS, BURST = 16, 128, 128, 64  # of `cost`
ROUTING_WORKLOADS = ("prefix_caching", "multi_turn")

COST_COLUMNS = [
    "model",
    "server",
    "output tokens / s",
    "of the plain server's",
    "TTFT p50, ms",
    "ITL p50, ms",
]
PROFILE_COLUMNS = ["server", "process", "processor time a token, µs"]
ROUTING_COLUMNS = ["workload", "replicas", "routing", "hit rate, %", "TTFT p50, ms", "TTFT p95, ms"]


# ---------------------------------------------------------------------------------------------- cost


def cost(
    console: Console, phase: str = "8", models: tuple[str, ...] = ("zoo:llama-tiny",), turns: int = 3
) -> Iterator[MeasuredTable]:
    """Send the same burst to a plain server, to a cluster of one replica, and of two.

    Args:
        phase: number, word or module
        turns: of each; medians are shown
    """
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of the plain server; replicas are told
    yield MeasuredTable(
        name="cluster_cost",
        title="the same burst to a plain server and to a cluster",
        setup={
            "phase": find_phase_module(phase),
            "burst": f"{BURST} requests, prompts and answers of {PROMPT_TOKENS} and {NEW_TOKENS} tokens",
            "seats of an engine": str(SEATS),
            "threads of an engine": str(THREADS),
            "cores": str(os.cpu_count()),
            "median of": f"{turns} turns",
        },
        columns=COST_COLUMNS,
        rows=[row for model in models for row in cost_rows(phase, model, turns, console)],
    )


def cost_rows(phase: str, model: str, turns: int, console: Console) -> list[list[Cell]]:
    """Measure the servers in turns, and return a row of the table for each."""
    length = 2 * (PROMPT_TOKENS + NEW_TOKENS)
    targets = [
        plain_target(phase, model, seats=SEATS, max_seq_len=length),
        *(cluster_target(phase, model, n, seats=SEATS, max_seq_len=length) for n in (1, 2)),
    ]
    writer = PromptWriter(open_checkpoint(model).tokenizer())
    found: dict[str, list[tuple[float, float, float]]] = {target.label: [] for target in targets}
    for turn in range(1, turns + 1):
        for target in targets:
            with RunningServer(target) as server:
                orders = identical_requests(
                    writer,
                    count=BURST,
                    prompt_tokens=PROMPT_TOKENS,
                    new_tokens=NEW_TOKENS,
                    seed=f"cost:{turn}",
                )
                found[target.label].append(speed(load(server, orders, warmup_requests(writer) * 2)))
            console.print(f"{model}, turn {turn}, {target.label}: {found[target.label][-1][0]:,.0f} tokens/s")
    middle = {
        label: [statistics.median(each) for each in zip(*turns, strict=True)]
        for label, turns in found.items()
    }
    plain = middle[targets[0].label][0]
    return [
        [model, label, tokens_s, tokens_s / plain, ttft_s * 1e3, itl_s * 1e3]
        for label, (tokens_s, ttft_s, itl_s) in middle.items()
    ]


def speed(result: LoadResult) -> tuple[float, float, float]:
    """Return a burst's output tokens a second, its median TTFT and its median gap, in seconds."""
    records = result.requests
    begun = min(record.sent_s for record in records if record.sent_s is not None)
    ended = max(record.finished_s for record in records if record.finished_s is not None)
    tokens = sum(record.completion_tokens for record in records)
    return (
        tokens / (ended - begun),
        percentile([record.ttft_s for record in records], 0.5),
        percentile([gap for record in records for gap in record.gaps_s], 0.5),
    )


# ---------------------------------------------------------------------------------------------- profile

#: What Serve does when it is told nothing (`cluster.environment` tells it otherwise).
AS_RAY_COMES = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}

#: Whose time it is, by what is in the process's command line.
PROCESSES = {
    "ServeReplica:infer:replica": "replica: engine and app",
    "ServeReplica:infer:front": "front",
}
OTHERS = "the rest of Ray"


def profile(
    console: Console, phase: str = "8", model: str = "zoo:llama-tiny", turns: int = 3
) -> Iterator[MeasuredTable]:
    """Measure processor time of a token. Unlike tokens a second, it depends little on what else the machine does.

    Args:
        phase: number, word or module
        turns: bursts
    """
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of the plain server; replicas are told
    length = 2 * (PROMPT_TOKENS + NEW_TOKENS)
    plain = plain_target(phase, model, seats=SEATS, max_seq_len=length)
    one = cluster_target(phase, model, 1, seats=SEATS, max_seq_len=length)
    writer = PromptWriter(open_checkpoint(model).tokenizer())
    rows: list[list[Cell]] = []
    for label, target, environment in (
        ("plain server", plain, {}),
        ("cluster of 1", one, {}),
        ("cluster of 1, Serve's defaults", one, AS_RAY_COMES),
    ):
        os.environ |= environment
        with RunningServer(target) as server:
            spent = processor_time(server, writer, turns)
        for name in environment:
            del os.environ[name]
        rows += [[label, process, seconds * 1e6] for process, seconds in spent.items()]
        rows.append([label, "all", sum(spent.values()) * 1e6])
        console.print(f"{label}: {sum(spent.values()) * 1e6:.0f} µs", highlight=False)
    yield MeasuredTable(
        name="cluster_profile",
        title="processor time of a token, process by process",
        setup={
            "phase": find_phase_module(phase),
            "model": model,
            "burst": f"{BURST} requests, prompts and answers of {PROMPT_TOKENS} and {NEW_TOKENS} tokens, "
            f"{turns} times after a first that does not count",
            "seats of an engine": str(SEATS),
            "threads of an engine": str(THREADS),
            "cores": str(os.cpu_count()),
        },
        columns=PROFILE_COLUMNS,
        rows=rows,
    )


def processor_time(server: RunningServer, writer: PromptWriter, turns: int) -> dict[str, float]:
    """Return the processor time of an output token by process, in seconds. The prompts are part of it."""
    before: dict[str, float] = {}
    for turn in range(turns + 1):
        orders = identical_requests(
            writer, count=BURST, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, seed=f"profile:{turn}"
        )
        load(server, orders, [])
        if turn == 0:
            before = times_of(server.pid)
    tokens = turns * BURST * NEW_TOKENS
    return {
        process: (seconds - before[process]) / tokens for process, seconds in times_of(server.pid).items()
    }


def times_of(pid: int) -> dict[str, float]:
    """Return the processor time of a server and of all processes below it, in seconds, by process."""
    root = psutil.Process(pid)
    children = root.children(recursive=True)
    found: dict[str, float] = {}
    for process in [root, *children]:
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            named = [name for part, name in PROCESSES.items() if part in line]
            name = named[0] if named else OTHERS if children else "server: engine and app"
            times = process.cpu_times()
            found[name] = found.get(name, 0.0) + times.user + times.system
    return found


# ---------------------------------------------------------------------------------------------- routing


def routing(
    console: Console,
    phase: str = "8",
    model: str = "zoo:llama-tiny",
    replicas: tuple[int, ...] = (1, 2, 4),
    rate: float = 1.0,
    turns: int = 3,
) -> Iterator[MeasuredTable]:
    """Send prompts with shared prefixes, and chats, to clusters that route by prefix and at random.

    Args:
        phase: number, word or module
        rate: × the workload's
        turns: seeds; medians are shown
    """
    rows: list[list[Cell]] = []
    for count, policy in itertools.product(replicas, ("random", "prefix")):
        length = max(WORKLOADS[name].longest for name in ROUTING_WORKLOADS)
        target = cluster_target(phase, model, count, seats=8, max_seq_len=length, routing=policy)
        for name, hits, ttft_p50, ttft_p95 in cache_uses(target, model, rate, turns):
            rows.append([name, count, policy, hits * 100, ttft_p50 * 1e3, ttft_p95 * 1e3])
            console.print(f"{name}, {count} replicas, {policy}: {hits:.0%}, {ttft_p50 * 1e3:.0f} ms")
    rows.sort(key=lambda row: ROUTING_WORKLOADS.index(str(row[0])))
    yield MeasuredTable(
        name="cluster_routing",
        title="routing by prefix against random routing",
        setup={
            "phase": find_phase_module(phase),
            "model": model,
            "arrivals": f"{rate:g} × the table's",
            "seats of an engine": "8",
            "threads of an engine": str(THREADS),
            "cores": str(os.cpu_count()),
            "caches": "emptied before each run",
            "median of": f"{turns} seeds",
        },
        columns=ROUTING_COLUMNS,
        rows=rows,
    )


def cache_uses(
    target: Target, model: str, rate: float, turns: int
) -> Iterator[tuple[str, float, float, float]]:
    """Yield each workload with what `cache_use` says of it: medians over seeds, all of one cluster."""
    writer = PromptWriter(open_checkpoint(model).tokenizer())
    with RunningServer(target) as server, httpx.Client(base_url=server.url, timeout=30.0) as client:
        for name in ROUTING_WORKLOADS:
            runs = []
            for seed in range(turns):
                client.post("/reset_prefix_cache", json={}).raise_for_status()
                orders = build(WORKLOADS[name], writer, seed=seed, factor=rate)
                runs.append(cache_use(load(server, orders, warmup_requests(writer))))
            hits, ttft_p50, ttft_p95 = (statistics.median(each) for each in zip(*runs, strict=True))
            yield name, hits, ttft_p50, ttft_p95


def cache_use(result: LoadResult) -> tuple[float, float, float]:
    """Return the share of prompt tokens found in a cache, and TTFT's p50 and p95 in seconds."""
    assert result.telemetry_before is not None
    assert result.telemetry_after is not None
    before, after = result.telemetry_before["counters"], result.telemetry_after["counters"]
    looked_for = after["prompt_tokens"] - before["prompt_tokens"]
    found = after["cached_tokens"] - before["cached_tokens"]
    ttfts = [record.ttft_s for record in result.requests]
    return found / looked_for, percentile(ttfts, 0.5), percentile(ttfts, 0.95)
