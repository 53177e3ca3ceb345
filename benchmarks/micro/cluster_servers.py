"""Servers that `cluster` and `cluster_loss` start, and a load of which no request may fail."""

from __future__ import annotations

from benchmarks.client import Endpoint
from benchmarks.loadgen import LoadPlan, run_load
from benchmarks.results import LoadResult
from benchmarks.servers import RunningServer, Target, find_phase_module
from benchmarks.workloads import PlannedRequest

THREADS = 1  # of a replica, and of the plain server


def plain_target(phase: str, model: str, *, seats: int, max_seq_len: int) -> Target:
    """Return how to start a phase as a plain server."""
    return Target("plain server", 0, find_phase_module(phase), _options(model, seats, max_seq_len))


def cluster_target(
    phase: str, model: str, replicas: int, *, seats: int, max_seq_len: int, routing: str = "auto"
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


def load(server: RunningServer, requests: list[PlannedRequest], warmup: list[PlannedRequest]) -> LoadResult:
    """Send requests to a server, and return what the load generator saw.

    Raises:
        RuntimeError: one of them failed.
    """
    result = run_load(LoadPlan(Endpoint(server.url, server.model), requests, warmup=warmup))
    errors = [record.error for record in result.requests if record.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(requests)} requests failed: {errors[0]}")
    return result
