"""The picture of phase 9's page: when the host and the stream did what, from a trace of a real run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import load_tables
from docs.building.pictures import figure, text
from docs.building.results import RESULTS

WIDTH, LABEL, LANE = 640, 52, 20
LANES = ("host", "stream")
KINDS = {
    "plan": "prefill",
    "launch": "launch",
    "mask": "mask",
    "wait": "hidden",
    "commit": "idle",
    "forward": "decode",
    "sample": "sample",
}


def pipeline_timeline(runs: str, results: Path = RESULTS) -> str:
    """The steps of what runs, one at a time above, and with two in flight below, on one scale."""
    found = [table for table in load_tables(results) if table.name == "pipeline_trace"]
    rows = [row for row in found[0].rows if row[0] == runs] if found else []
    if not rows:
        return "Not drawn yet: `.venv/bin/python -m benchmarks micro pipeline_trace` writes the trace.\n"
    spans = [
        (int(depth or 0), str(lane), str(what), float(a or 0), float(b or 0))
        for _, depth, lane, what, a, b in rows
    ]
    longest = max(ended for *_, ended in spans)
    scale = (WIDTH - LABEL) / longest
    shapes: list[str] = []
    y = 0
    for depth in sorted({each[0] for each in spans}):
        title = f"{depth} in flight" if depth else "one step at a time"
        title += f", the stream busy for {found[0].setup[f'{runs}, depth {depth}, stream busy']}"
        shapes.append(text(LABEL, y + 14, title, "label"))
        y += 20
        for lane in LANES:
            shapes.append(text(0, y + 15, lane, "label"))
            for _, _, what, began, ended in (each for each in spans if each[:2] == (depth, lane)):
                x, width = LABEL + began * scale, max((ended - began) * scale, 0.6)
                shapes.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" class="{KINDS[what]}">'
                    f"<title>{what}, {ended - began:.2f} ms</title></rect>"
                )
            y += LANE + 4
        y += 8
    shapes.append(text(WIDTH - 24, y + 8, f"{longest:.3g} ms", "step"))
    steps = int(found[0].setup["steps"])
    legend = " ".join(
        f'<span class="key {kind}">{what} {_a_step(spans, what, steps)}</span>'
        for what, kind in KINDS.items()
        if any(each[2] == what for each in spans)
    )
    return figure(WIDTH, y + 14, shapes, f"Host and stream of {runs} in time", legend)


def _a_step(spans: Sequence[tuple[int, str, str, float, float]], what: str, steps: int) -> str:
    """What it takes of a step on average, at each depth."""
    depths = sorted({depth for depth, *_ in spans})
    taken = (sum(b - a for d, _, each, a, b in spans if (d, each) == (depth, what)) for depth in depths)
    return " / ".join(f"{each / steps:.2g}" for each in taken) + " ms"
