"""A replica is killed under load: the tokens its clients still get, and the time until it is replaced.

All over HTTP. A replica computes with one thread. Needs Ray (the extra `cluster`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence

import httpx
import psutil

from benchmarks.micro.cluster_servers import THREADS, cluster_target
from benchmarks.servers import RunningServer, find_phase_module
from benchmarks.tables import Cell, MeasuredTable

BIN_S = 0.5  # of the timeline
ANSWER_TOKENS = 48

COLUMNS = ["second", "output tokens / s", "answers cut off", "replicas"]


class Watch:
    """Clients that send one request after the other. Notes when tokens, errors and refusals arrive."""

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


def loss(
    phase: str = "8", model: str = "zoo:llama-tiny", before: float = 6.0, after: float = 40.0
) -> Iterator[MeasuredTable]:
    """Kill one of two replicas, as the kernel kills what takes too much memory.

    Args:
        phase: number, word or module
        before: seconds until it is killed
        after: seconds that follow
    """
    target = cluster_target(phase, model, 2, seats=8, max_seq_len=256)
    with RunningServer(target) as server:
        watch = Watch(server, clients=8)
        time.sleep(before)
        replica = replica_processes(server.pid)[0]
        killed_s = watch.now()
        replica.kill()
        while watch.now() < killed_s + after:
            time.sleep(BIN_S)
        watch.stop()
    gone = [at for at, count in watch.replicas if at > killed_s and count < 2]
    back = [at for at, count in watch.replicas if gone and at > gone[0] and count == 2]
    setup = {
        "phase": find_phase_module(phase),
        "model": model,
        "clients": f"8, each with one answer of {ANSWER_TOKENS} tokens after the other",
        "killed at": f"{killed_s:.1f} s",
        "cut off": f"{len(watch.cut)} answers",
        "refused": f"{len(watch.refused)} requests",
        "seen to be gone after": f"{gone[0] - killed_s:.1f} s" if gone else "less than was looked for",
        "replaced after": f"{back[0] - killed_s:.1f} s" if back else "more than was waited for",
        "threads of an engine": str(THREADS),
        "cores": str(os.cpu_count()),
    }
    rows: list[list[Cell]] = []
    for index in range(int((killed_s + after) / BIN_S)):
        begin, end = index * BIN_S, (index + 1) * BIN_S

        def count(times: Sequence[float], begin: float = begin, end: float = end) -> int:
            return sum(begin <= at < end for at in times)

        rows.append([begin, count(watch.tokens) / BIN_S, count(watch.cut), watch.replicas_at(end)])
    yield MeasuredTable(
        name="cluster_loss",
        title="a replica is killed, and replaced",
        setup=setup,
        columns=COLUMNS,
        rows=rows,
    )


def replica_processes(pid: int) -> list[psutil.Process]:
    """Return the replicas among the processes that a cluster has started."""
    return [
        each
        for each in psutil.Process(pid).children(recursive=True)
        if "ServeReplica:infer:replica" in "".join(each.cmdline())
    ]
