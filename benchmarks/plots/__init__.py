"""Draws every figure from the results alone: the same results give the same bytes.

A figure is two files, light and dark. `captions.json` beside them has each figure's caption, the comparison that it
shows and its files. The next call of `draw_all` reads there which files were drawn, and removes the figures whose
results are gone.
"""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.plots.figures import KINDS, FigureKind
from benchmarks.plots.groups import Group, load_groups
from benchmarks.plots.style import in_the_dark, styled

CAPTIONS = "captions.json"


def draw_all(results: Path, out: Path) -> list[Path]:
    """Draw all figures, and remove figures whose results are gone. Returns the paths of the drawn figures.

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
    for group, kind in itertools.product(groups, KINDS):
        if kind.has_data(group):
            name = f"{group.name}-{kind.name}"
            files = _draw(group, kind, out / name)
            written.extend(files.values())
            captions[name] = _entry(group, kind, files)
    for name in stale - {path.name for path in written}:
        (out / name).unlink(missing_ok=True)
    text = json.dumps(captions, indent=1, ensure_ascii=False, sort_keys=True)
    (out / CAPTIONS).write_text(text + "\n", encoding="utf-8")
    return written


def _draw(group: Group, kind: FigureKind, stem: Path) -> dict[str, Path]:
    svg = io.StringIO()
    with styled():
        # Without date and version, the file changes only if the figure changes.
        kind.draw(group).savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    themes = {"light": svg.getvalue(), "dark": in_the_dark(svg.getvalue())}
    files = {theme: stem.with_name(f"{stem.name}-{theme}.svg") for theme in themes}
    for theme, path in files.items():
        path.write_text(themes[theme], encoding="utf-8")
    return files


def _entry(group: Group, kind: FigureKind, files: dict[str, Path]) -> dict[str, Any]:
    run = group.first
    return {
        "title": group.title,
        "caption": kind.caption(group),
        "figure": kind.name,
        "workload": run.workload.name,
        "model": run.server.model,
        "quick": run.workload.quick,
        "comparison": run.comparison,
        "size": _size(files["light"]),
        "files": {theme: path.name for theme, path in files.items()},
    }


def _size(path: Path) -> list[int]:
    """Return the width and height of a figure in pixels. They are the same in all themes."""
    root = ElementTree.parse(path).getroot()
    return [round(float(root.attrib[side].removesuffix("pt")) * 4 / 3) for side in ("width", "height")]


def _drawn_before(out: Path) -> list[str]:
    """Return the names of the files that were last drawn into this folder."""
    captions = out / CAPTIONS
    if not captions.is_file():
        return []
    return [name for entry in json.loads(captions.read_text()).values() for name in entry["files"].values()]
