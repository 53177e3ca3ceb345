"""Draws every figure from the results alone: the same results give the same bytes.

A figure is two files, light and dark. `captions.json` beside them says what each shows and which runs it is made
of; it is also how a later run knows which files are its own to remove, when the results they came from are gone.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from matplotlib.figure import Figure

from benchmarks.plots.figures import KINDS, FigureKind, runs_drawn
from benchmarks.plots.groups import Group, load_groups
from benchmarks.plots.replicas import CAPTION, KIND, NAME, draw_replicas
from benchmarks.plots.style import THEMES, Theme, themed
from benchmarks.tables import MeasuredTable, newest_table

CAPTIONS = "captions.json"


def draw_all(results: Path, out: Path) -> list[Path]:
    """Draw all figures and remove those that no result stands behind any more. Returns the files written.

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
    for group in groups:
        for kind in KINDS:
            if kind.has_data(group):
                files = _draw(functools.partial(kind.draw, group), f"{group.name}-{kind.name}", out)
                written += files.values()
                captions[f"{group.name}-{kind.name}"] = _entry(group, kind, files)
    if table := newest_table(NAME, results):
        files = _draw(functools.partial(draw_replicas, table), table.name, out)
        written += files.values()
        captions[table.name] = _table_entry(table, files)
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
            # No date and no version inside: they would change the file where the figure is the same.
            draw(theme).savefig(path, metadata={"Date": None, "Creator": None})
        files[theme.name] = path
    return files


def _size(files: dict[str, Path]) -> list[int]:
    """Return the width and height of a figure in pixels: all themes draw it alike."""
    root = ElementTree.parse(files["light"]).getroot()
    return [round(float(root.attrib[side].removesuffix("pt")) * 4 / 3) for side in ("width", "height")]


def _table_entry(table: MeasuredTable, files: dict[str, Path]) -> dict[str, Any]:
    return {
        "title": table.title,
        "caption": CAPTION,
        "figure": KIND,
        "workload": table.name,
        "quick": False,
        "size": _size(files),
        "files": {theme: path.name for theme, path in files.items()},
    }


def _entry(group: Group, kind: FigureKind, files: dict[str, Path]) -> dict[str, Any]:
    run = group.first
    return {
        "title": group.title,
        "caption": kind.caption(group),
        "figure": kind.name,
        "workload": run.workload.name,
        "model": run.server.model,
        "quick": run.workload.quick,
        "servers": [server.label for server in group.servers],
        "repeats": max(drawn.repeat for drawn in runs_drawn(group)),
        "comparison": run.comparison,
        "factor": run.calibration.factor if run.calibration else None,
        "size": _size(files),
        "files": {theme: path.name for theme, path in files.items()},
    }


def _drawn_before(out: Path) -> list[str]:
    """Return the names of the files that were last drawn into this folder."""
    captions = out / CAPTIONS
    if not captions.is_file():
        return []
    return [name for entry in json.loads(captions.read_text()).values() for name in entry["files"].values()]
