"""Measured sections of pages: the main picture open, the rest folded, a tab for each model; and single ratios."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.files import Together
from benchmarks.report import columns_of, median_of
from docs.building.markdown import folded, indented
from docs.building.results import (
    HEADLINES,
    LINES,
    PLOTS,
    RESULTS,
    chosen,
    complete_groups,
    group_table,
    measured_table,
    missing,
    setup_of,
    sweep_table,
)

Entry = dict[str, Any]
BARS = "bars"  # the figure that every comparison has
REPEATS = 3  # fewest runs of each server: with fewer, chance decides


def measured_section(
    workload: str,
    *labels: str,
    first: str,
    chats: str = "",
    root: str = "../",
    results: Path = RESULTS,
    folder: Path = PLOTS,
) -> str:
    """Return a workload's newest comparisons that have these servers, with a tab for each model.

    Args:
        first: the name of the figure that is not folded.
        chats: the workload that shows the same effect with a model that chats; "" for none.
        root: from the page to the site's root.
    """
    found = chosen(workload, labels, results)
    if not found:
        return missing(workload, labels)
    if chats:
        found += chosen(chats, labels, results)
    parts = [_story(group, labels, first, root, folder) for group in found]
    if len(parts) == 1:
        return parts[0]
    tabs = [
        f'=== "{_tab_title(group)}"\n\n{indented(part)}\n' for group, part in zip(found, parts, strict=True)
    ]
    return "\n".join(tabs)


def ratio(
    workload: str,
    before: str,
    after: str,
    line: str,
    model: str = "dummy:llama-60m",
    results: Path = RESULTS,
) -> str:
    """Return the ratio of a metric in the newest comparison of two servers, such as `×0.45`, for a sentence."""
    found = dict(model_ratios(workload, before, after, line, results))
    return f"×{found[model]:.2f}" if model in found else "(not measured yet)"


def ratios(workload: str, before: str, after: str, line: str, results: Path = RESULTS) -> str:
    """Like `ratio`, for each model that was measured, such as `×0.45 (dummy:a), ×0.50 (dummy:b)`."""
    found = model_ratios(workload, before, after, line, results)
    return ", ".join(f"×{value:.2f} (`{model}`)" for model, value in found) or "(not measured yet)"


def model_ratios(
    workload: str, before: str, after: str, line: str, results: Path = RESULTS
) -> Iterator[tuple[str, float]]:
    """Yield each model and the ratio in its newest comparison of two servers with enough repeats."""
    asked = next(each for each in LINES if each.title == line)
    for model, group in newest_groups(workload, before, after, results).items():
        columns = {runs[0].server.label: runs for runs in columns_of(group.runs)}
        old, new = median_of(columns[before], asked), median_of(columns[after], asked)
        if old and new is not None:
            yield model, new / old


def newest_groups(workload: str, before: str, after: str, results: Path = RESULTS) -> dict[str, Together]:
    """Return each model's newest published comparison of two servers with enough repeats."""
    newest: dict[str, Together] = {}
    for group in complete_groups(results):
        run = group.first
        fits = run.workload.name == workload and {before, after} <= set(group.labels)
        if fits and not run.workload.quick and not group.local and group.repeats >= REPEATS:
            newest.setdefault(run.server.model, group)
    return newest


def folded_table(name: str, title: str = "All numbers", results: Path = RESULTS) -> str:
    """Return a measured table, folded."""
    return folded(title, measured_table(name, results))


def folded_sweep(workload: str, *options: str, results: Path = RESULTS) -> str:
    """Return a sweep's tables, folded."""
    return folded("Each setting", sweep_table(workload, *options, results=results))


def story_picture(
    workload: str, *labels: str, first: str, root: str, results: Path = RESULTS, folder: Path = PLOTS
) -> str:
    """Return one figure of a workload's newest comparison of these servers."""
    found = chosen(workload, labels, results)[:1]
    entries = [entry for group in found for entry in _drawn(group, labels, folder)]
    return "".join(picture(entry, root) for entry in entries if entry["figure"] == first)


def pictures_of(group: Together, root: str, folder: Path = PLOTS) -> str:
    """Return all figures that were drawn of a comparison, folded; "" if there are none."""
    run = group.first
    same = [
        entry
        for entry in _entries(folder)
        if entry["comparison"] == run.comparison
        and (entry["workload"], entry["model"], entry["quick"])
        == (run.workload.name, run.server.model, run.workload.quick)
    ]
    return folded("Pictures", "\n".join(picture(entry, root) for entry in same)) if same else ""


def picture(entry: Entry, root: str) -> str:
    """Return a figure, light and dark, and its caption."""
    width, height = entry["size"]
    # The size lets the browser reserve the figure's place before the figure is loaded.
    shape = f"loading=lazy width={width} height={height}"
    images = "\n".join(
        f"![{entry['title']}]({root}assets/plots/{entry['files'][theme]}){{ .plot .only-{theme} {shape} }}"
        for theme in ("light", "dark")
    )
    return f"{images}\n\n**{entry['title']}.** {entry['caption']}\n{{: .plot-caption }}\n"


def _story(group: Together, labels: Sequence[str], first: str, root: str, folder: Path) -> str:
    entries = _drawn(group, labels, folder)
    # A comparison without timelines has few figures.
    first = first if any(entry["figure"] == first for entry in entries) else BARS
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


def _drawn(group: Together, labels: Sequence[str], folder: Path) -> list[Entry]:
    """Return the figures of this comparison, or those of another one with the same model and servers."""
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


def _tab_title(group: Together) -> str:
    model = group.first.server.model.removeprefix("dummy:")
    return f"{model} ({group.folder})" if group.folder else model
