"""Draws every figure from the results alone: the same results give the same bytes.

A figure is two files, light and dark. `captions.json` beside them has each figure's caption and the comparison that
it shows. A later run reads there which files were drawn, and removes those whose results are gone.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from matplotlib.figure import Figure

from benchmarks.plots.figures import KINDS, FigureKind
from benchmarks.plots.groups import Group, load_groups
from benchmarks.plots.replicas import CAPTION, KIND, NAME, draw_replicas
from benchmarks.plots.style import THEMES, Theme, themed
from benchmarks.tables import MeasuredTable, newest_table

CAPTIONS = "captions.json"


def draw_all(results: Path, out: Path) -> list[Path]:
    """Draw all figures, and remove figures whose results are gone. Returns the files written.

    Raises:
        ValueError: a file in `results` is not a result, or `results` is not a folder.
    """
    if not results.is_dir():
        raise ValueError(f"--results {results}: no such folder; `python -m benchmarks compare` makes results")
    groups = load_groups(results)
    out.mkdir(parents=True, exist_ok=True)
    stale = set(_drawn_before(out))
    captions: dict[str, Any] = {}
    written: list[Path] = []

    def draw(name: str, figure: Callable[[Theme], Figure], entry: dict[str, Any]) -> None:
        files = _draw(figure, name, out)
        written.extend(files.values())
        named = {theme: path.name for theme, path in files.items()}
        captions[name] = entry | {"size": _size(files), "files": named}

    for group, kind in itertools.product(groups, KINDS):
        if kind.has_data(group):
            draw(f"{group.name}-{kind.name}", functools.partial(kind.draw, group), _entry(group, kind))
    if table := newest_table(NAME, results):
        draw(table.name, functools.partial(draw_replicas, table), _table_entry(table))
    for name in stale - {path.name for path in written}:
        (out / name).unlink(missing_ok=True)
    text = json.dumps(captions, indent=1, ensure_ascii=False, sort_keys=True)
    (out / CAPTIONS).write_text(text + "\n", encoding="utf-8")
    return written


def _draw(draw: Callable[[Theme], Figure], name: str, out: Path) -> dict[str, Path]:
    files = {}
    for theme in THEMES:
        path = out / f"{name}-{theme.name}.svg"
        with themed(theme):
            # Without date and version, the file changes only if the figure changes.
            draw(theme).savefig(path, metadata={"Date": None, "Creator": None})
        files[theme.name] = path
    return files


def _size(files: dict[str, Path]) -> list[int]:
    """Return the width and height of a figure in pixels: all themes draw it alike."""
    root = ElementTree.parse(files["light"]).getroot()
    return [round(float(root.attrib[side].removesuffix("pt")) * 4 / 3) for side in ("width", "height")]


def _entry(group: Group, kind: FigureKind) -> dict[str, Any]:
    run = group.first
    return {
        "title": group.title,
        "caption": kind.caption(group),
        "figure": kind.name,
        "workload": run.workload.name,
        "model": run.server.model,
        "quick": run.workload.quick,
        "servers": [server.label for server in group.servers],
        "repeats": max(drawn.repeat for server in group.servers for drawn in server.runs),
        "comparison": run.comparison,
        "factor": run.calibration.factor if run.calibration else None,
    }


def _table_entry(table: MeasuredTable) -> dict[str, Any]:
    return {
        "title": table.title,
        "caption": CAPTION,
        "figure": KIND,
        "workload": table.name,
        "quick": False,
    }


def _drawn_before(out: Path) -> list[str]:
    """Return the names of the files that were last drawn into this folder."""
    captions = out / CAPTIONS
    if not captions.is_file():
        return []
    return [name for entry in json.loads(captions.read_text()).values() for name in entry["files"].values()]
