"""Parts of the page about clusters: options, arithmetic, and pictures of measured runs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables import Cell, newest_table
from cluster.options import ClusterOptions
from common.server.options import CommonOptions
from docs.building.options import fields_table
from docs.building.pictures import Bar, bars
from docs.building.results import RESULTS

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 640


def cluster_options_table() -> str:
    """Return the options of a cluster that a phase's own server does not have."""
    own = {
        name: field
        for name, field in ClusterOptions.model_fields.items()
        if name not in CommonOptions.model_fields
    }
    return fields_table(own)


def cluster_file() -> str:
    """Return `cluster/example.yaml` as a code block."""
    return (
        f'```yaml title="cluster/example.yaml"\n{(ROOT / "cluster/example.yaml").read_text().strip()}\n```\n'
    )


def routing_picture(workload: str, results: Path = RESULTS) -> str:
    """Draw hit rates of random and of prefix routing as bars, with the median TTFT beside each."""
    table = newest_table("cluster_routing", results)
    if table is None:
        return "Not measured yet: `.venv/bin/python -m benchmarks micro cluster_routing` does it.\n"
    shown = []
    for _, replicas, routing, hits, ttft_ms, _ in (row for row in table.rows if row[0] == workload):
        name = f"{replicas} replica{'s' if replicas != 1 else ''}, {routing}"
        written = f"{_number(hits):.0f}%, {_number(ttft_ms):,.0f} ms"
        kind = "decode" if routing == "prefix" else "idle"
        shown.append(Bar(name, _number(hits), written, kind, opens_group=routing != "prefix"))
    legend = '<span class="key idle">random</span> <span class="key decode">prefix</span>'
    title = f"Share of prompt tokens found in a cache, and median TTFT: {workload}"
    return bars(shown, title, legend, labels=190, width=WIDTH, most=100)


def _number(cell: Cell) -> float:
    return float(cell or 0)
