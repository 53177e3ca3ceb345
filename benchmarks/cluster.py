"""What a cluster costs, what routing by prefix brings, and what a lost replica does to clients.

`python -m benchmarks.cluster cost`      the same burst to a plain server, to a cluster of one replica, and of two
`python -m benchmarks.cluster profile`   processor time of a token, process by process
`python -m benchmarks.cluster routing`   prefix against random routing: shared beginnings, and chats
`python -m benchmarks.cluster loss`      a replica is killed under load; another takes its place

All over HTTP. A replica computes with one thread, and so does the plain server. Needs Ray (the extra `cluster`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from pathlib import Path

import httpx
import psutil
from rich.console import Console

from benchmarks.calibrate import warmup_requests
from benchmarks.cluster_loss import loss
from benchmarks.cluster_servers import THREADS, cluster_target, load, plain_target
from benchmarks.metrics import percentile
from benchmarks.results import LOCAL, LoadResult
from benchmarks.servers import RunningServer, find_phase_module
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


def cost(options: argparse.Namespace, console: Console) -> MeasuredTable:
    rows = [row for model in options.models for row in cost_rows(options, model, console)]
    return MeasuredTable(
        name="cluster_cost",
        title="the same burst to a plain server and to a cluster",
        setup={
            "phase": find_phase_module(options.phase),
            "burst": f"{BURST} requests, prompts and answers of {PROMPT_TOKENS} and {NEW_TOKENS} tokens",
            "seats of an engine": str(SEATS),
            "threads of an engine": str(THREADS),
            "cores": str(os.cpu_count()),
            "median of": f"{options.turns} turns",
        },
        columns=COST_COLUMNS,
        rows=rows,
    )


def cost_rows(options: argparse.Namespace, model: str, console: Console) -> list[list[Cell]]:
    """A row for each server; they take turns."""
    length = 2 * (PROMPT_TOKENS + NEW_TOKENS)
    targets = [
        plain_target(options.phase, model, seats=SEATS, max_seq_len=length),
        *(cluster_target(options.phase, model, n, seats=SEATS, max_seq_len=length) for n in (1, 2)),
    ]
    writer = PromptWriter(open_checkpoint(model).tokenizer())
    found: dict[str, list[tuple[float, float, float]]] = {target.label: [] for target in targets}
    for turn in range(1, options.turns + 1):
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
    """Output tokens a second of a burst, the median TTFT and the median gap, in seconds."""
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
    "ProxyActor": "Ray's proxy",
}
OTHERS = "the rest of Ray"


def profile(options: argparse.Namespace, console: Console) -> MeasuredTable:
    """Unlike tokens a second, processor time depends little on what else the machine does."""
    model, length = options.models[0], 2 * (PROMPT_TOKENS + NEW_TOKENS)
    plain = plain_target(options.phase, model, seats=SEATS, max_seq_len=length)
    one = cluster_target(options.phase, model, 1, seats=SEATS, max_seq_len=length)
    writer = PromptWriter(open_checkpoint(model).tokenizer())
    rows: list[list[Cell]] = []
    for label, target, environment in (
        ("plain server", plain, {}),
        ("cluster of 1", one, {}),
        ("cluster of 1, Serve's defaults", one, AS_RAY_COMES),
    ):
        os.environ |= environment
        with RunningServer(target) as server:
            spent = processor_time(server, writer, options.turns)
        for name in environment:
            del os.environ[name]
        rows += [[label, process, seconds * 1e6] for process, seconds in spent.items()]
        rows.append([label, "all", sum(spent.values()) * 1e6])
        console.print(f"{label}: {sum(spent.values()) * 1e6:.0f} µs", highlight=False)
    return MeasuredTable(
        name="cluster_profile",
        title="processor time of a token, process by process",
        setup={
            "phase": find_phase_module(options.phase),
            "model": model,
            "burst": f"{BURST} requests, prompts and answers of {PROMPT_TOKENS} and {NEW_TOKENS} tokens, "
            f"{options.turns} times after a first that does not count",
            "seats of an engine": str(SEATS),
            "cores": str(os.cpu_count()),
        },
        columns=PROFILE_COLUMNS,
        rows=rows,
    )


def processor_time(server: RunningServer, writer: PromptWriter, turns: int) -> dict[str, float]:
    """Seconds for each output token, by process; prompts are computed in them, too."""
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
    """Processor time in seconds of a server and all that it has started, by process."""
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


def routing(options: argparse.Namespace, console: Console) -> MeasuredTable:
    rows: list[list[Cell]] = []
    for replicas in options.replicas:
        for policy in ("random", "prefix"):
            rows += routing_rows(options, replicas, policy, console)
    rows.sort(key=lambda row: ROUTING_WORKLOADS.index(str(row[0])))
    return MeasuredTable(
        name="cluster_routing",
        title="routing by prefix against random routing",
        setup={
            "phase": find_phase_module(options.phase),
            "model": options.models[0],
            "arrivals": f"{options.rate:g} × the table's",
            "seats of an engine": "8",
            "threads of an engine": str(THREADS),
            "cores": str(os.cpu_count()),
            "caches": "emptied before each run",
            "median of": f"{options.turns} seeds",
        },
        columns=ROUTING_COLUMNS,
        rows=rows,
    )


def routing_rows(
    options: argparse.Namespace, replicas: int, policy: str, console: Console
) -> list[list[Cell]]:
    """A row for each workload, of one cluster."""
    model = options.models[0]
    writer = PromptWriter(open_checkpoint(model).tokenizer())
    length = max(WORKLOADS[name].longest for name in ROUTING_WORKLOADS)
    target = cluster_target(options.phase, model, replicas, seats=8, max_seq_len=length, routing=policy)
    rows: list[list[Cell]] = []
    with RunningServer(target) as server, httpx.Client(base_url=server.url, timeout=30.0) as client:
        for name in ROUTING_WORKLOADS:
            runs = []
            for seed in range(options.turns):
                client.post("/reset_prefix_cache", json={}).raise_for_status()
                orders = build(WORKLOADS[name], writer, seed=seed, factor=options.rate)
                runs.append(cache_use(load(server, orders, warmup_requests(writer))))
            hits, ttft_p50, ttft_p95 = (statistics.median(each) for each in zip(*runs, strict=True))
            rows.append([name, replicas, policy, hits * 100, ttft_p50 * 1e3, ttft_p95 * 1e3])
            console.print(f"{name}, {replicas} replicas, {policy}: {hits:.0%}, {ttft_p50 * 1e3:.0f} ms")
    return rows


def cache_use(result: LoadResult) -> tuple[float, float, float]:
    """The share of prompt tokens found in a cache, and TTFT's p50 and p95 in seconds."""
    assert result.telemetry_before is not None
    assert result.telemetry_after is not None
    before, after = result.telemetry_before["counters"], result.telemetry_after["counters"]
    looked_for = after["prompt_tokens"] - before["prompt_tokens"]
    found = after["cached_tokens"] - before["cached_tokens"]
    ttfts = [record.ttft_s for record in result.requests]
    return found / looked_for, percentile(ttfts, 0.5), percentile(ttfts, 0.95)


# ---------------------------------------------------------------------------------------------- all


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("what", choices=["cost", "profile", "routing", "loss"])
    options.add_argument("--phase", default="8", help="number, word or module (8)")
    options.add_argument(
        "--models", nargs="+", default=["zoo:llama-tiny"], help="of which only cost takes several"
    )
    options.add_argument("--turns", type=int, default=3, help="of each, medians are shown (3)")
    options.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4], help="for routing (1 2 4)")
    options.add_argument("--rate", type=float, default=1.0, help="for routing: × the workload's (1)")
    options.add_argument("--before", type=float, default=6.0, help="for loss: seconds until it is killed (6)")
    options.add_argument("--after", type=float, default=40.0, help="for loss: seconds that follow (40)")
    options.add_argument("--out", type=Path, default=LOCAL, help=f"folder for results ({LOCAL})")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of the plain server; replicas are told
    console = Console()
    table = {"cost": cost, "profile": profile, "routing": routing, "loss": loss}[options.what](
        options, console
    )
    if options.what != "loss":
        table.print(console)
    console.print(f"written to {table.save(options.out)}")


if __name__ == "__main__":
    main()
