"""Merges the answers of all replicas into one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import orjson
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.forwarding import Head, Whole

HEALTH, METRICS = "/health", "/metrics"
OK, SERVER_ERROR = 200, 500


def merge(path: str, replies: Mapping[str, Whole]) -> Whole:
    """Return the merged answer to `path`, one of `MERGES`.

    A replica that cannot answer (5xx: its engine is dead, or it drains) is left out. If a replica refuses the
    request (4xx), its error is the merged answer. If no replica can answer, the first error is the merged answer.
    """
    refusal = _refusal(replies)
    if refusal is not None:
        return refusal
    bodies = {name: body for name, (head, body) in replies.items() if head.status == OK}
    head = next(head for head, _ in replies.values() if head.status == OK)
    return _with_body(head, MERGES[path](bodies))


def health(replies: Mapping[str, Whole], *, wanted: int, known: Collection[str], draining: bool) -> Whole:
    """Return the answer to `/health`: 200 if a replica lives and none refuses the request.

    Args:
        replies: the answers, by replica; replicas that did not answer are missing.
        wanted: the smallest number of replicas that the cluster should have.
        known: names of all replicas that should be there; one that did not answer is lost.
        draining: whether the front takes no more requests.
    """
    states = dict.fromkeys(known, "lost") | {
        name: _state(head, body) for name, (head, body) in replies.items()
    }
    refusal = _refusal(replies)
    if refusal is not None:
        return refusal
    head, body = next(whole for whole in replies.values() if whole[0].status == OK)
    living = sum(head.status == OK for head, _ in replies.values())
    well = living == len(states) and living >= wanted
    said = {
        "status": "draining" if draining else "ok" if well else "degraded",
        "phase": orjson.loads(body)["phase"],
        "replicas": states,
    }
    return _with_body(head, orjson.dumps(said))


def _state(head: Head, body: bytes) -> str:
    """Return the state that a replica reports: its status, or the code of its error."""
    said = orjson.loads(body)
    return str(said["status"] if head.status == OK else said["error"]["code"])


def _refusal(replies: Mapping[str, Whole]) -> Whole | None:
    """Return the refusal to send instead of a merged answer, if there is one."""
    of_the_request = (whole for whole in replies.values() if OK < whole[0].status < SERVER_ERROR)
    all_refused = all(head.status != OK for head, _ in replies.values())
    return next(of_the_request, next(iter(replies.values())) if all_refused else None)


def _with_body(head: Head, body: bytes) -> Whole:
    headers = [(name, value) for name, value in head.headers if name != b"content-length"]
    return Head(head.status, (*headers, (b"content-length", b"%d" % len(body)))), body


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
