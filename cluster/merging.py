"""One answer of what every replica has said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families


def merge(path: str, bodies: Mapping[str, bytes]) -> bytes:
    """The answer to `path`, from each replica's."""
    return MERGES[path](bodies)


def merge_telemetry(bodies: Mapping[str, bytes]) -> bytes:
    """Sums; each replica's own answer, with its steps, is under its name.

    Steps of different engines are no sequence, so there are none outside of `replicas`.
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
    """Every replica's numbers, with its name as a label; Prometheus adds them up."""
    families: dict[str, Metric] = {}
    for replica, body in bodies.items():
        for family in text_string_to_metric_families(body.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    return generate_latest(_Collected(families))


class _Collected:
    """Families that are there already, as a registry has them."""

    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return list(self._families.values())


def merge_resets(bodies: Mapping[str, bytes]) -> bytes:
    dropped = (orjson.loads(body)["dropped_blocks"] for body in bodies.values())
    return orjson.dumps({"dropped_blocks": sum(dropped)})


#: Routes that every replica is asked, and what makes one answer of theirs.
MERGES: dict[str, Callable[[Mapping[str, bytes]], bytes]] = {
    "/telemetry": merge_telemetry,
    "/metrics": merge_metrics,
    "/reset_prefix_cache": merge_resets,
}
