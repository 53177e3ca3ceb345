"""Parts of the page about clusters: options, arithmetic, and pictures of measured runs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables import Cell, newest_table
from cluster.options import ClusterOptions
from cluster.policy import Load
from cluster.scaling import TARGET, replicas_for
from common.server.options import CommonOptions
from docs.building.options import fields_table
from docs.building.pictures import figure, text
from docs.building.results import RESULTS

ROOT = Path(__file__).resolve().parents[2]
WIDTH, LABEL, BAR = 640, 190, 16

#: Sums of loads for which the page says how many replicas they are worth, each with what it is.
SUMS = (
    ("one engine, half full", [0.5]),
    ("one engine with a full batch", [1.0]),
    ("one engine, and two batches more wait", [3.0]),
    ("four engines, all full", [1.0] * 4),
    ("four engines, a quarter full", [0.25] * 4),
)


def cluster_options_table() -> str:
    """Return the options of a cluster that a phase's own server does not have."""
    own = {
        name: field
        for name, field in ClusterOptions.model_fields.items()
        if name not in CommonOptions.model_fields
    }
    return fields_table(own)


def cluster_file() -> str:
    """Return the config file that is in the tree."""
    return (
        f'```yaml title="cluster/example.yaml"\n{(ROOT / "cluster/example.yaml").read_text().strip()}\n```\n'
    )


def scaling_table() -> str:
    """Return a table of loads, and the number of replicas that each asks for."""
    rows = [f"| engines | sum of loads | ÷ {TARGET:g} | replicas |", "| --- | ---: | ---: | ---: |"]
    for said, loads in SUMS:
        total = sum(loads)
        rows.append(f"| {said} | {total:g} | {total / TARGET:.2f} | {replicas_for(loads)} |")
    return "\n".join(rows) + "\n"


def load_table() -> str:
    """Return a table of states of an engine with 8 seats, and its load in each."""
    said = (
        ("idle", Load(seats=8, queue_room=72)),
        ("four short requests", Load(seats=8, active=4, kv_use=0.1, queue_room=68)),
        ("two requests that hold most of the memory", Load(seats=8, active=2, kv_use=0.9, queue_room=70)),
        ("a full batch, and six wait", Load(seats=8, active=8, waiting=6, kv_use=0.7, queue_room=58)),
    )
    rows = ["| an engine of 8 seats | load |", "| --- | ---: |"]
    rows += [f"| {name} | {load.value:.2f} |" for name, load in said]
    return "\n".join(rows) + "\n"


def routing_picture(workload: str, results: Path = RESULTS) -> str:
    """Draw hit rates of random and of prefix routing as bars, with the median TTFT beside each."""
    table = newest_table("cluster_routing", results)
    if table is None:
        return "Not measured yet: `.venv/bin/python -m benchmarks micro cluster_routing` does it.\n"
    shapes: list[str] = []
    y = 0
    for _, replicas, routing, hits, ttft_ms, _ in (row for row in table.rows if row[0] == workload):
        share = _number(hits) / 100
        width = share * (WIDTH - LABEL - 150)
        name = f"{replicas} replica{'s' if replicas != 1 else ''}, {routing}"
        shapes.append(text(0, y + 13, name, "label"))
        kind = "decode" if routing == "prefix" else "idle"
        shapes.append(
            f'<rect x="{LABEL}" y="{y}" width="{max(width, 1):.1f}" height="{BAR}" class="{kind}"></rect>'
        )
        shapes.append(text(LABEL + width + 6, y + 13, f"{share:.0%}, {_number(ttft_ms):,.0f} ms", "label"))
        y += BAR + (10 if routing == "prefix" else 4)
    legend = '<span class="key idle">random</span> <span class="key decode">prefix</span>'
    title = f"Share of prompt tokens found in a cache, and median TTFT: {workload}"
    return figure(WIDTH, y, shapes, title, legend)


def loss_picture(results: Path = RESULTS) -> str:
    """Draw tokens a second before and after a replica was killed, and the number of replicas."""
    table = newest_table("cluster_loss", results)
    if table is None:
        return "Not measured yet: `.venv/bin/python -m benchmarks micro cluster_loss` does it.\n"
    height, base = 120, 140
    most = max(_number(row[1]) for row in table.rows) or 1.0
    step = WIDTH / len(table.rows)
    shapes: list[str] = []
    for index, (second, rate, cut, replicas) in enumerate(table.rows):
        x, tall = index * step, _number(rate) / most * height
        kind = "decode" if replicas == 2 else "idle"
        shapes.append(
            f'<rect x="{x:.1f}" y="{base - tall:.1f}" width="{step - 1:.1f}" height="{tall:.1f}" class="{kind}">'
            f"<title>{_number(second):g} s: {_number(rate):,.0f} tokens/s, {replicas} replicas</title></rect>"
        )
        if cut:
            shapes.append(
                f'<rect x="{x:.1f}" y="0" width="{step - 1:.1f}" height="8" class="prefill"></rect>'
            )
        if _number(second) % 5 == 0:
            shapes.append(text(x + step / 2, base + 16, f"{_number(second):g} s", "step"))
    shapes.append(text(0, 12, f"{most:,.0f} tokens/s", "label"))
    legend = (
        '<span class="key decode">two replicas answer</span> <span class="key idle">one does</span> '
        '<span class="key prefill">answers are cut off</span>'
    )
    return figure(WIDTH, base + 22, shapes, "Tokens a second while a replica is killed and replaced", legend)


def loss_story(*names: str, results: Path = RESULTS) -> str:
    """Return lines of that run's setup by name."""
    table = newest_table("cluster_loss", results)
    if table is None:
        return ""
    return "; ".join(f"{name} {table.setup[name]}" for name in names) + "."


def _number(cell: Cell) -> float:
    return float(cell or 0)
