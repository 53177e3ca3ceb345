"""Clusters of a phase: their cost beside a plain server, the gain of routing by prefix, and a replica's loss.

All requests are sent over HTTP. Each engine computes with one thread. Needs Ray (the extra `cluster`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence

import httpx
import psutil

from benchmarks.calibrate import warmup_requests
from benchmarks.loadgen import run_whole_load
from benchmarks.metrics import summarize
from benchmarks.micro import medians, say, writer_for
from benchmarks.results import LoadResult, Metrics
from benchmarks.servers import RunningServer, Target, find_phase_module
from benchmarks.tables import Cell, MeasuredTable
from benchmarks.workloads import WORKLOADS, PlannedRequest, PromptWriter, build, identical_requests

THREADS = 1  # of an engine
SEATS, PROMPT_TOKENS, NEW_TOKENS, BURST = 16, 128, 128, 64  # of `cost` and `profile`
MAX_SEQ_LEN = 2 * (PROMPT_TOKENS + NEW_TOKENS)
BURST_IN_WORDS = f"{BURST} requests, prompts and answers of {PROMPT_TOKENS} and {NEW_TOKENS} tokens"

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
LOSS_COLUMNS = ["second", "output tokens / s", "answers cut off", "replicas"]


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
    """Return how to start a cluster of a phase. There may be more replicas than cores: they share the cores."""
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


def setup_of(phase: str, seats: int = SEATS, **facts: str) -> dict[str, str]:
    """Return the setup of a table."""
    return {
        "phase": find_phase_module(phase),
        **facts,
        "seats of an engine": str(seats),
        "threads of an engine": str(THREADS),
        "cores": str(os.cpu_count()),
    }


def burst(writer: PromptWriter, seed: str) -> list[PlannedRequest]:
    return identical_requests(
        writer, count=BURST, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, seed=seed
    )


def metrics_of(result: LoadResult) -> Metrics:
    return summarize(result.requests, slo_ttft_s=float("inf"), slo_itl_s=float("inf"))


# ---------------------------------------------------------------------------------------------- cost


def cost(
    phase: str = "8", models: tuple[str, ...] = ("zoo:llama-tiny",), turns: int = 3
) -> Iterator[MeasuredTable]:
    """Send the same burst to a plain server, to a cluster of one replica, and of two.

    Args:
        phase: number, word or module
        turns: of each; medians are shown
    """
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of the plain server; replicas get --threads
    yield MeasuredTable(
        name="cluster_cost",
        title="the same burst to a plain server and to a cluster",
        setup=setup_of(phase, burst=BURST_IN_WORDS) | {"median of": f"{turns} turns"},
        columns=COST_COLUMNS,
        rows=[row for model in models for row in cost_rows(phase, model, turns)],
    )


def cost_rows(phase: str, model: str, turns: int) -> list[list[Cell]]:
    """Measure the servers in turns, and return a row of the table for each."""
    targets = [plain_target(phase, model), *(cluster_target(phase, model, n) for n in (1, 2))]
    writer = writer_for(model)
    found: dict[str, list[tuple[float, float, float]]] = {target.label: [] for target in targets}
    for turn, target in itertools.product(range(1, turns + 1), targets):
        with RunningServer(target) as server:
            requests, warmup = burst(writer, f"cost:{turn}"), warmup_requests(writer) * 2
            found[target.label].append(speed(run_whole_load(server.endpoint, requests, warmup)))
        say(f"{model}, turn {turn}, {target.label}: {found[target.label][-1][0]:,.0f} tokens/s")
    middle = {label: medians(each) for label, each in found.items()}
    plain = middle[targets[0].label][0]
    return [
        [model, label, tokens_s, tokens_s / plain, ttft_s * 1e3, itl_s * 1e3]
        for label, (tokens_s, ttft_s, itl_s) in middle.items()
    ]


def speed(result: LoadResult) -> tuple[float, float, float]:
    """Return a burst's output tokens a second, its median TTFT and its median gap, in seconds."""
    metrics = metrics_of(result)
    assert metrics.ttft_s is not None
    assert metrics.itl_s is not None
    return metrics.output_tokens_per_s, metrics.ttft_s.p50, metrics.itl_s.p50


# ---------------------------------------------------------------------------------------------- profile

#: Serve's own defaults, which `cluster.environment` changes.
AS_RAY_COMES = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}

REPLICA = "ServeReplica:infer:replica"
#: The table's name of a process, by a part of the process's command line.
PROCESSES = {REPLICA: "replica: engine and app", "ServeReplica:infer:front": "front"}
OTHERS = "the rest of Ray"


def profile(phase: str = "8", model: str = "zoo:llama-tiny", turns: int = 3) -> Iterator[MeasuredTable]:
    """Measure processor time of a token. Unlike tokens a second, it depends little on what else the machine does.

    Args:
        phase: number, word or module
        turns: bursts
    """
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of the plain server; replicas get --threads
    writer, one = writer_for(model), cluster_target(phase, model, 1)
    rows: list[list[Cell]] = []
    for label, target, environment in (
        ("plain server", plain_target(phase, model), {}),
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
        say(f"{label}: {sum(spent.values()) * 1e6:.0f} µs")
    in_words = f"{BURST_IN_WORDS}, {turns} times after a first that does not count"
    yield MeasuredTable(
        name="cluster_profile",
        title="processor time of a token, process by process",
        setup=setup_of(phase, model=model, burst=in_words),
        columns=PROFILE_COLUMNS,
        rows=rows,
    )


def processor_time(server: RunningServer, writer: PromptWriter, turns: int) -> dict[str, float]:
    """Return the processor time of an output token by process, in seconds. The prompts are part of it."""
    run_whole_load(server.endpoint, burst(writer, "profile:0"))
    before = times_of(server.pid)
    for turn in range(1, turns + 1):
        run_whole_load(server.endpoint, burst(writer, f"profile:{turn}"))
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

ROUTING_WORKLOADS = ("prefix_caching", "multi_turn")


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
        rate: × the workload's
        turns: seeds; medians are shown
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
    """Yield each workload with the numbers of `cache_use`: medians over seeds, all of one cluster."""
    writer = writer_for(model)
    with RunningServer(target) as server, httpx.Client(base_url=server.url, timeout=30.0) as client:
        for name in ROUTING_WORKLOADS:
            runs = []
            for seed in range(turns):
                client.post("/reset_prefix_cache", json={}).raise_for_status()
                requests = build(WORKLOADS[name], writer, seed=seed, factor=rate)
                runs.append(cache_use(run_whole_load(server.endpoint, requests, warmup_requests(writer))))
            hits, ttft_p50, ttft_p95 = medians(runs)
            yield name, hits, ttft_p50, ttft_p95


def cache_use(result: LoadResult) -> tuple[float, float, float]:
    """Return the share of prompt tokens found in a cache, and TTFT's p50 and p95 in seconds."""
    ttft = metrics_of(result).ttft_s
    assert ttft is not None
    assert result.telemetry_before is not None
    assert result.telemetry_after is not None
    before, after = result.telemetry_before["counters"], result.telemetry_after["counters"]
    looked_for = after["prompt_tokens"] - before["prompt_tokens"]
    return (after["cached_tokens"] - before["cached_tokens"]) / looked_for, ttft.p50, ttft.p95


# ---------------------------------------------------------------------------------------------- loss

BIN_S = 0.5  # of the timeline
CLIENTS, ANSWER_TOKENS = 8, 48


class Watch:
    """Clients that send one request after the other. Notes when tokens, errors and refusals arrive."""

    def __init__(self, server: RunningServer) -> None:
        self._url, self._model = server.url, server.model
        self._over = threading.Event()
        self._origin_s = time.monotonic()
        self.tokens: list[float] = []  # when each came
        self.cut: list[float] = []  # when each answer ended with an error
        self.refused: list[float] = []
        self.replicas: list[tuple[float, int]] = []
        asking = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(CLIENTS)]
        self._threads = [*asking, threading.Thread(target=self._count_replicas, daemon=True)]
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
                        self.refused.append(self.now())
                        time.sleep(0.2)
                    for line in response.iter_lines():
                        if line == "event: token":
                            self.tokens.append(self.now())
                        elif line == "event: error":
                            self.cut.append(self.now())

    def _count_replicas(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60.0) as client:
            while not self._over.is_set():
                said = client.get("/telemetry", params={"since_step": 2**53})
                if said.status_code == 200:
                    self.replicas.append((self.now(), len(said.json()["replicas"])))
                time.sleep(BIN_S / 2)

    def rows(self, until_s: float) -> list[list[Cell]]:
        """Return a row for each stretch of `BIN_S` seconds; cells as in `LOSS_COLUMNS`."""
        rows: list[list[Cell]] = []
        for begin in (index * BIN_S for index in range(int(until_s / BIN_S))):

            def count(times: Sequence[float], begin: float = begin) -> int:
                return sum(begin <= at < begin + BIN_S for at in times)

            known = [number for at, number in self.replicas if at <= begin + BIN_S]
            rows.append([begin, count(self.tokens) / BIN_S, count(self.cut), known[-1] if known else None])
        return rows


def loss(
    phase: str = "8", model: str = "zoo:llama-tiny", before: float = 6.0, after: float = 40.0
) -> Iterator[MeasuredTable]:
    """Kill one of two replicas, as the kernel kills a process that takes too much memory.

    Args:
        phase: number, word or module
        before: seconds until it is killed
        after: seconds that follow
    """
    with RunningServer(cluster_target(phase, model, 2, seats=8, max_seq_len=256)) as server:
        watch = Watch(server)
        time.sleep(before)
        processes = psutil.Process(server.pid).children(recursive=True)
        replica = next(each for each in processes if REPLICA in "".join(each.cmdline()))
        killed_s = watch.now()
        replica.kill()
        time.sleep(after)
        watch.stop()
    gone = [at for at, count in watch.replicas if at > killed_s and count < 2]
    back = [at for at, count in watch.replicas if gone and at > gone[0] and count == 2]
    facts = {
        "clients": f"{CLIENTS}, each with one answer of {ANSWER_TOKENS} tokens after the other",
        "killed at": f"{killed_s:.1f} s",
        "cut off": f"{len(watch.cut)} answers",
        "refused": f"{len(watch.refused)} requests",
        "seen to be gone after": f"{gone[0] - killed_s:.1f} s" if gone else "less than was looked for",
        "replaced after": f"{back[0] - killed_s:.1f} s" if back else "more than was waited for",
    }
    yield MeasuredTable(
        name="cluster_loss",
        title="a replica is killed, and replaced",
        setup=setup_of(phase, 8, model=model) | facts,
        columns=LOSS_COLUMNS,
        rows=watch.rows(killed_s + after),
    )
