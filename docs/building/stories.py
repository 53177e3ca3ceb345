"""A measured section as it is read: the picture that tells the story, and all else folded; a tab for each model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs.building.folding import folded, indented
from docs.building.results import (
    HEADLINES,
    LINES,
    PLOTS,
    RESULTS,
    Group,
    chosen,
    group_table,
    measured_table,
    missing,
    setup_of,
    sweep_table,
)

Entry = dict[str, Any]


def measured_section(
    workload: str,
    *labels: str,
    first: str,
    root: str = "../",
    results: Path = RESULTS,
    folder: Path = PLOTS,
) -> str:
    """A workload's newest comparisons that have these servers, a tab for each model where there are several.

    Args:
        first: the figure that stands open.
        root: from the page to the site's root.
    """
    found = chosen(workload, labels, results)
    if not found:
        return missing(workload, labels)
    parts = [_story(group, labels, first, root, folder) for group in found]
    if len(parts) == 1:
        return parts[0]
    tabs = [
        f'=== "{_tab_title(group)}"\n\n{indented(part)}\n' for group, part in zip(found, parts, strict=True)
    ]
    return "\n".join(tabs)


def folded_table(name: str, title: str = "All numbers", results: Path = RESULTS) -> str:
    """A measured table, folded."""
    return folded(title, measured_table(name, results))


def folded_sweep(workload: str, *options: str, results: Path = RESULTS) -> str:
    """A sweep's tables, folded."""
    return folded("Each setting", sweep_table(workload, *options, results=results))


def story_picture(
    workload: str, *labels: str, first: str, root: str, results: Path = RESULTS, folder: Path = PLOTS
) -> str:
    """One figure of a workload's newest comparison of these servers, and nothing else."""
    found = chosen(workload, labels, results)[:1]
    entries = [entry for group in found for entry in _drawn(group, labels, folder)]
    return "".join(picture(entry, root) for entry in entries if entry["figure"] == first)


def pictures_of(group: Group, root: str, folder: Path = PLOTS) -> str:
    """All figures that were drawn of a comparison, folded; nothing where none were."""
    run = group.first
    same = [
        entry
        for entry in _entries(folder)
        if entry.get("comparison") == run.comparison  # a table's figure is of none
        and (entry["workload"], entry["model"], entry["quick"])
        == (run.workload.name, run.server.model, run.workload.quick)
    ]
    return folded("Pictures", "\n".join(picture(entry, root) for entry in same)) if same else ""


def figures(name: str, root: str = "", folder: Path = PLOTS) -> str:
    """What was drawn under this name; nothing where it was not."""
    return "\n".join(picture(entry, root) for entry in _entries(folder) if entry["workload"] == name)


def picture(entry: Entry, root: str) -> str:
    """A figure, light and dark, and its caption."""
    width, height = entry["size"]
    # With its size the page keeps a figure's place free while the figure loads.
    shape = f"loading=lazy width={width} height={height}"
    images = "\n".join(
        f"![{entry['title']}]({root}assets/plots/{entry['files'][theme]}){{ .plot .only-{theme} {shape} }}"
        for theme in ("light", "dark")
    )
    return f"{images}\n\n**{entry['title']}.** {entry['caption']}\n{{: .plot-caption }}\n"


def _story(group: Group, labels: Sequence[str], first: str, root: str, folder: Path) -> str:
    entries = _drawn(group, labels, folder)
    opening = [picture(entry, root) for entry in entries if entry["figure"] == first]
    if opening and entries[0]["comparison"] != group.first.comparison:
        opening.append(
            "(The picture is of an earlier comparison, with more servers; the numbers are of the latest.)\n"
        )
    others = [picture(entry, root) for entry in entries if entry["figure"] != first]
    table = f"{setup_of(group)}\n\n{group_table(group, [line for line in LINES if line.title in HEADLINES])}"
    parts = [*opening, folded("All numbers", table)]
    if others:
        parts.append(folded("More pictures", "\n".join(others)))
    return "\n".join(parts)


def _drawn(group: Group, labels: Sequence[str], folder: Path) -> list[Entry]:
    """Figures of this comparison; where another one was drawn for the same model and servers, of that."""
    run = group.first
    fitting = [
        entry
        for entry in _entries(folder)
        if entry["workload"] == run.workload.name
        and entry["model"] == run.server.model
        and not entry["quick"]
        and set(labels) <= set(entry["servers"])
    ]
    own = [entry for entry in fitting if entry["comparison"] == run.comparison]
    return own or fitting


def _entries(folder: Path) -> list[Entry]:
    index = folder / "captions.json"
    return list(json.loads(index.read_text(encoding="utf-8")).values()) if index.is_file() else []


def _tab_title(group: Group) -> str:
    model = group.first.server.model.removeprefix("dummy:")
    return f"{model} ({group.folder})" if group.folder else model
