"""Pictures of committed traces (`common.trace`), drawn when the site is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from benchmarks.micro.long_prompt import TRACES
from common.phases import find_phase
from docs.building.pictures import figure, text
from docs.building.results import RESULTS

WIDTH, LABEL, LANE = 660, 84, 18
KINDS = {"waiting": "hidden", "a chunk of a prompt": "prefill", "a step with its next token": "decode"}


@dataclass(slots=True)
class Drawn:
    """What of a trace is drawn; times in milliseconds.

    Attributes:
        label: what it is of.
        steps: when each began and ended.
        spans: a request's name -> (what, from, to): `waiting`, `chunk …` and `decode`.
    """

    label: str = ""
    steps: list[tuple[float, float]] = field(default_factory=list)
    spans: dict[str, list[tuple[str, float, float]]] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return max(ended for _, ended in self.steps)

    @property
    def longest_step(self) -> float:
        return max(ended - began for began, ended in self.steps)


def read(path: Path) -> Drawn:
    """A complete trace."""
    drawn = Drawn()
    names: dict[Any, str] = {}
    begun: dict[Any, list[tuple[str, float]]] = {}
    for event in orjson.loads(path.read_bytes()):
        match event:
            case {"ph": "M", "name": "process_labels"}:
                drawn.label = event["args"]["labels"]
            case {"ph": "X", "name": str(name)} if name.startswith("step "):
                drawn.steps.append((event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3))
            case {"ph": "b", "id": track}:
                names.setdefault(track, event["name"])
                begun.setdefault(track, []).append((event["name"], event["ts"] / 1e3))
            case {"ph": "e", "id": track}:
                what, began = begun[track].pop()
                if begun[track] and what != "prefill":  # the outermost is the request's own
                    drawn.spans.setdefault(names[track], []).append((what, began, event["ts"] / 1e3))
    return drawn


def trace_pictures(what: str, *phases: str, results: Path = RESULTS) -> str:
    """Traces of several phases, one above the other on one scale."""
    paths = {phase: results / TRACES / f"{what}-{phase}.trace" for phase in phases}
    if not all(path.is_file() for path in paths.values()):
        return f"Not drawn yet: `.venv/bin/python -m benchmarks micro {what}` writes the traces.\n"
    found = {phase: read(path) for phase, path in paths.items()}
    longest = max(drawn.end for drawn in found.values())
    scale = (WIDTH - LABEL) / longest
    shapes: list[str] = []
    y = 0
    for phase, drawn in found.items():
        number = find_phase(phase).PHASE.number
        title = f"phase {number}, its longest step {drawn.longest_step:.3g} ms"
        shapes.append(text(LABEL, y + 14, title, "label"))
        y += 20
        for name, cells in [
            ("steps", [("step", *step) for step in drawn.steps]),
            *sorted(drawn.spans.items()),
        ]:
            shapes.append(text(0, y + 13, name, "label"))
            shapes += [
                _cell(cell, y, scale)
                for cell in _cut(cells, drawn.steps)
                if cell[2] - cell[1] > longest / WIDTH
            ]
            y += LANE + 3
        y += 12
    shapes.append(text(WIDTH - 24, y + 4, f"{longest:.3g} ms", "step"))
    seen = {kind for kind in KINDS.values() if any(f'class="{kind}"' in shape for shape in shapes)}
    legend = " ".join(
        f'<span class="key {kind}">{words}</span>' for words, kind in KINDS.items() if kind in seen
    )
    labels = sorted({drawn.label for drawn in found.values()})
    title = "Steps and requests in time: " + ", ".join(found)
    return figure(WIDTH, y + 10, shapes, title, legend) + f"\nRecorded: {'; '.join(labels)}.\n"


def _cut(
    spans: Sequence[tuple[str, float, float]], steps: Sequence[tuple[float, float]]
) -> Iterator[tuple[str, float, float]]:
    """Spans of decoding as the steps that they last, each of which ends with a token."""
    for what, began, ended in spans:
        if what == "decode":
            yield from (("decode", *step) for step in steps if began <= step[0] and step[1] <= ended)
        else:
            yield what, began, ended


def _cell(span: tuple[str, float, float], y: float, scale: float) -> str:
    what, began, ended = span
    kind = {"waiting": "hidden", "step": "idle", "decode": "decode"}.get(what, "prefill")
    x, width = (
        LABEL + began * scale,
        max((ended - began) * scale - 1, 0.6),
    )  # a gap between one step and the next
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" class="{kind}">'
        f"<title>{what}, {ended - began:.2f} ms</title></rect>"
    )
