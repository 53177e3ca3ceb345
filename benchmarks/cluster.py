"""What a cluster costs, what routing by prefix brings, and what a lost replica does to clients.

`python -m benchmarks.cluster cost`      the same burst to a plain server, to a cluster of one replica, and of two
`python -m benchmarks.cluster routing`   prefix against random routing: shared beginnings, and chats
`python -m benchmarks.cluster loss`      a replica is killed under load; another takes its place

All over HTTP. A replica computes with one thread, and so does the plain server. Needs Ray (the extra `cluster`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
from rich.console import Console

from benchmarks.calibrate import warmup_requests
from benchmarks.client import Endpoint
from benchmarks.loadgen import LoadPlan, run_load
from benchmarks.metrics import percentile
from benchmarks.results import LOCAL, LoadResult
from benchmarks.servers import RunningServer, Target, find_phase_module
from benchmarks.tables import Cell, MeasuredTable
from benchmarks.workloads import WORKLOADS, PlannedRequest, PromptWriter, build, identical_requests
from common.models.registry import open_checkpoint

THREADS = 1  # of a replica, and of the plain server
SEATS, PROMPT_TOKENS, NEW_TOKENS, BURST = 16, 128, 128, 64  # of `cost`
ROUTING_WORKLOADS = ("prefix_caching", "multi_turn")
BIN_S = 0.5  # of the timeline of `loss`
ANSWER_TOKENS = 48  # of `loss`

COST_COLUMNS = [
    "model",
    "server",
    "output tokens / s",
    "of the plain server's",
    "TTFT p50, ms",
    "ITL p50, ms",
]
ROUTING_COLUMNS = ["workload", "replicas", "routing", "hit rate, %", "TTFT p50, ms", "TTFT p95, ms"]
LOSS_COLUMNS = ["second", "output tokens / s", "answers cut off", "replicas"]


def plain_target(phase: str, model: str, *, seats: int, max_seq_len: int) -> Target:
    """A phase's own server."""
    return Target("plain server", 0, find_phase_module(phase), _options(model, seats, max_seq_len))


def cluster_target(
    phase: str, model: str, replicas: int, *, seats: int, max_seq_len: int, routing: str = "auto"
) -> Target:
    """The same behind a front. Replicas may be more than cores: they share them."""
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


def load(server: RunningServer, requests: list[PlannedRequest], warmup: list[PlannedRequest]) -> LoadResult:
    """Send requests to a server.

    Raises:
        RuntimeError: one of them failed.
    """
    result = run_load(LoadPlan(Endpoint(server.url, server.model), requests, warmup=warmup))
    errors = [record.error for record in result.requests if record.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(requests)} requests failed: {errors[0]}")
    return result


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
                client.post("/reset_prefix_cache").raise_for_status()
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


# ---------------------------------------------------------------------------------------------- loss


class Watch:
    """Clients that ask again and again, and what became of their answers, on one clock."""

    def __init__(self, server: RunningServer, clients: int) -> None:
        self._url, self._model = server.url, server.model
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._origin_s = time.monotonic()
        self.tokens: list[float] = []  # when each came
        self.cut: list[float] = []  # when each answer ended with an error
        self.refused: list[float] = []
        self.replicas: list[tuple[float, int]] = []
        jobs = [*(lambda n=n: self._ask(n) for n in range(clients)), self._count_replicas]
        self._threads = [threading.Thread(target=job, daemon=True) for job in jobs]
        for thread in self._threads:
            thread.start()

    def now(self) -> float:
        return time.monotonic() - self._origin_s

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60.0)

    def _ask(self, number: int) -> None:
        body = {
            "model": self._model,
            "prompt": f"Client {number} asks for a story.",
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
        }
        with httpx.Client(base_url=self._url, timeout=60.0) as client:
            while not self._over.is_set():
                with client.stream("POST", "/v1/completions", json=body) as response:
                    if response.status_code != 200:
                        self._note(self.refused)
                        time.sleep(0.2)
                    for line in response.iter_lines():
                        if line == "event: token":
                            self._note(self.tokens)
                        elif line == "event: error":
                            self._note(self.cut)

    def _note(self, times: list[float]) -> None:
        with self._lock:
            times.append(self.now())

    def _count_replicas(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60.0) as client:
            while not self._over.is_set():
                said = client.get("/telemetry", params={"since_step": 2**53})
                if said.status_code == 200:
                    self.replicas.append((self.now(), len(said.json()["replicas"])))
                time.sleep(BIN_S / 2)

    def replicas_at(self, second: float) -> int | None:
        known = [count for at, count in self.replicas if at <= second]
        return known[-1] if known else None


def loss(options: argparse.Namespace, console: Console) -> MeasuredTable:
    """Two replicas; one is killed as the kernel kills what takes too much memory."""
    target = cluster_target(options.phase, options.models[0], 2, seats=8, max_seq_len=256)
    with RunningServer(target) as server:
        watch = Watch(server, clients=8)
        time.sleep(options.before)
        replica = replica_processes(server.pid)[0]
        killed_s = watch.now()
        replica.kill()
        while watch.now() < killed_s + options.after:
            time.sleep(BIN_S)
        watch.stop()
    gone = [at for at, count in watch.replicas if at > killed_s and count < 2]
    back = [at for at, count in watch.replicas if gone and at > gone[0] and count == 2]
    setup = {
        "phase": find_phase_module(options.phase),
        "model": options.models[0],
        "clients": f"8, each with one answer of {ANSWER_TOKENS} tokens after the other",
        "killed at": f"{killed_s:.1f} s",
        "cut off": f"{len(watch.cut)} answers",
        "refused": f"{len(watch.refused)} requests",
        "seen to be gone after": f"{gone[0] - killed_s:.1f} s" if gone else "less than was looked for",
        "replaced after": f"{back[0] - killed_s:.1f} s" if back else "more than was waited for",
        "cores": str(os.cpu_count()),
    }
    rows: list[list[Cell]] = []
    for index in range(int((killed_s + options.after) / BIN_S)):
        begin, end = index * BIN_S, (index + 1) * BIN_S

        def count(times: Sequence[float], begin: float = begin, end: float = end) -> int:
            return sum(begin <= at < end for at in times)

        rows.append([begin, count(watch.tokens) / BIN_S, count(watch.cut), watch.replicas_at(end)])
    console.print(", ".join(f"{name} {said}" for name, said in setup.items()), highlight=False)
    return MeasuredTable(
        name="cluster_loss",
        title="a replica is killed, and replaced",
        setup=setup,
        columns=LOSS_COLUMNS,
        rows=rows,
    )


def replica_processes(pid: int) -> list[psutil.Process]:
    """The replicas among the processes that a cluster's command has started."""
    return [
        each
        for each in psutil.Process(pid).children(recursive=True)
        if "ServeReplica:infer:replica" in "".join(each.cmdline())
    ]


# ---------------------------------------------------------------------------------------------- all


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("what", choices=["cost", "routing", "loss"])
    options.add_argument("--phase", default="8", help="number, word or module (8)")
    options.add_argument(
        "--models", nargs="+", default=["zoo:llama-tiny"], help="of which only cost takes several"
    )
    options.add_argument("--turns", type=int, default=3, help="of each, medians are shown (3)")
    options.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4], help="for routing (1 2 4)")
    options.add_argument("--rate", type=float, default=1.0, help="for routing: × the workload's (1)")
    options.add_argument("--before", type=float, default=6.0, help="for loss: seconds until it is killed (6)")
    options.add_argument("--after", type=float, default=24.0, help="for loss: seconds that follow (24)")
    options.add_argument("--out", type=Path, default=LOCAL, help=f"folder for results ({LOCAL})")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of the plain server; replicas are told
    console = Console()
    table = {"cost": cost, "routing": routing, "loss": loss}[options.what](options, console)
    if options.what != "loss":
        table.print(console)
    console.print(f"written to {table.save(options.out)}")


if __name__ == "__main__":
    main()
