"""Merges the answers of all replicas into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from cluster.forwarding import Whole

HEALTH, METRICS = "/health", "/metrics"
OK, SERVER_ERROR = 200, 500


def merge(path: str, replies: Mapping[str, Whole], *, wanted: int, draining: bool) -> Whole:
    """Return the merged answer to `path`: `HEALTH`, or one of `MERGES`.

    A replica that cannot answer (5xx: its engine is dead, or it drains) is left out. If a replica refuses the
    request (4xx), its error is the merged answer. If no replica can answer, the first error is the merged answer.

    Args:
        path: the route.
        replies: the answers, by replica; replicas that did not answer are missing.
        wanted: the smallest number of replicas that the cluster should have.
        draining: whether the front takes no more requests.
    """
    well = {name: body for name, (start, body) in replies.items() if start["status"] == OK}
    for start, body in replies.values():
        if not well or OK < start["status"] < SERVER_ERROR:
            return start, body
    if path == HEALTH:
        states = {name: _state(*reply) for name, reply in replies.items()}
        degraded = len(well) < max(len(replies), wanted)
        merged = orjson.dumps(
            {
                "status": "draining" if draining else "degraded" if degraded else "ok",
                "phase": orjson.loads(next(iter(well.values())))["phase"],
                "replicas": states,
            }
        )
    else:
        merged = MERGES[path](well)
    start = next(start for start, _ in replies.values() if start["status"] == OK)
    headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
    return {**start, "headers": [*headers, (b"content-length", b"%d" % len(merged))]}, merged


def _state(start: Message, body: bytes) -> str:
    """Return the state that a replica reports: its status, or the code of its error."""
    said = orjson.loads(body)
    return str(said["status"] if start["status"] == OK else said["error"]["code"])


def merge_telemetry(bodies: Mapping[str, bytes]) -> bytes:
    """Return the sums of all counters, and each replica's own answer, with its steps, under its name.

    Steps of different engines are no sequence, so only `replicas` has steps.
    """
    said: dict[str, dict[str, Any]] = {name: orjson.loads(body) for name, body in bodies.items()}
    first = next(iter(said.values()))
    counters = {name: sum(each["counters"][name] for each in said.values()) for name in first["counters"]}
    return orjson.dumps(
        {
            "phase": first["phase"],
            "max_batch_size": sum(each["max_batch_size"] for each in said.values()),
            "max_seq_len": first["max_seq_len"],
            "queue_room": sum(each["queue_room"] for each in said.values()),
            "counters": counters,
            "steps": [],
            "next_step": counters["steps"],
            "replicas": said,
        }
    )


def merge_metrics(bodies: Mapping[str, bytes]) -> bytes:
    """Return the metrics of every replica, with its name as a label. Prometheus adds them up."""
    families: dict[str, Metric] = {}
    for replica, body in bodies.items():
        for family in text_string_to_metric_families(body.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    return generate_latest(_Collected(families))


class _Collected:
    """A registry of metric families that were parsed from text."""

    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return list(self._families.values())


def merge_resets(bodies: Mapping[str, bytes]) -> bytes:
    dropped = (orjson.loads(body)["dropped_blocks"] for body in bodies.values())
    return orjson.dumps({"dropped_blocks": sum(dropped)})


#: Routes whose answer is merged from all replicas, beside `HEALTH`, and the function that merges their bodies.
MERGES: dict[str, Callable[[Mapping[str, bytes]], bytes]] = {
    "/telemetry": merge_telemetry,
    METRICS: merge_metrics,
    "/reset_prefix_cache": merge_resets,
}
