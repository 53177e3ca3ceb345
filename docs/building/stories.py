"""Measurements on pages: a figure and a table with a tab for each model, further figures, and single ratios."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.files import Together
from benchmarks.report import columns_of, median_of
from common.startup.phases import find_phase, phase_names
from docs.building.charts import NOT_MEASURED, measured_cell
from docs.building.markdown import folded, indented, table
from docs.building.results import (
    HEADLINES,
    LINES,
    PLOTS,
    RESULTS,
    chosen,
    compared_table,
    complete_groups,
    group_table,
    measured_table,
    missing,
    setup_of,
    unmeasured,
)

Entry = dict[str, Any]
BARS = "bars"  # the figure that every comparison has

#: The first three phases have no package: number, title, page and idea.
BEFORE_PHASES = (
    (1, "The model", "model", "from token ids to a score for every next token"),
    (2, "Sampling", "sampling", "each token is chosen with one random number of its own request"),
    (3, "The KV cache", "cache", "compute one token, not the whole text again"),
)

#: For each phase the metric and the server that it is compared with, in words, then the arguments of `ratio`.
HEADLINE_RATIOS = {
    4: ("throughput", "`generate()`", "mixed", "generate()", "phase 4", "output tokens / s"),
    5: ("first token, p99", "phase 4", "continuous_batching", "phase 4", "phase 5", "TTFT p99"),
    6: ("throughput", "phase 5", "paged_attention", "phase 5", "phase 6", "output tokens / s"),
    7: ("longest stall", "phase 6", "chunked_prefill", "phase 6", "phase 7", "longest stall"),
    8: ("first token, p50", "phase 7", "prefix_caching", "phase 7", "phase 8", "TTFT p50"),
    9: (
        *("throughput", "one step at a time, tiny model", "baseline", "phase 9, pipeline-depth=0", "phase 9"),
        *("output tokens / s", "zoo:llama-tiny"),
    ),
}
SPECULATIVE = 10  # the phase whose headline is measured without a server

REPEATS = 3  # fewest runs of each server: with fewer, differences may be chance


def measured_section(
    workload: str,
    *labels: str,
    first: str,
    chats: str = "",
    root: str = "../",
    results: Path = RESULTS,
    folder: Path = PLOTS,
) -> str:
    """Return one figure and one table of a workload's newest comparisons of these servers, a tab for each model.

    Args:
        labels: the labels of the servers. If there are two, the table says which metrics became better or worse.
        first: the kind of the figure, such as `stall` (`benchmarks.plots.figures`).
        chats: the workload that shows the same effect with a model that chats; "" for none.
        root: the relative path from the page to the site's root.
    """
    found = _comparisons(workload, labels, chats, results)
    parts = [(group, _opening(group, labels, first, root, folder)) for group in found]
    return _tabs(parts) if parts else missing(workload, labels)


def measured_rest(
    workload: str,
    *labels: str,
    first: str,
    chats: str = "",
    root: str = "../",
    results: Path = RESULTS,
    folder: Path = PLOTS,
) -> str:
    """Return the figures and servers that `measured_section` with the same arguments leaves out."""
    found = _comparisons(workload, labels, chats, results)
    return _tabs([(group, _others(group, labels, first, root, folder)) for group in found])


def fold(title: str, caller: Callable[[], str]) -> str:
    """Return the body of a call block in a box that opens on a click: `{% call fold("More") %} … {% endcall %}`."""
    return folded(title, caller())


def _comparisons(workload: str, labels: Sequence[str], chats: str, results: Path) -> list[Together]:
    found = chosen(workload, labels, results)
    return found + chosen(chats, labels, results) if found and chats else found


def _tabs(parts: Sequence[tuple[Together, str]]) -> str:
    """Return a tab for each comparison that has text. If only one has text, the text is returned without a tab."""
    shown = [(group, text) for group, text in parts if text]
    if len(shown) == 1:
        return shown[0][1]
    return "\n".join(f'=== "{_tab_title(group)}"\n\n{indented(text)}\n' for group, text in shown)


def headline_table() -> str:
    """Return a table with a row for each phase: its idea, and the measured number that its page explains."""
    rows = [
        [f"[{number}: {title}](phases/{page}.md)", idea, ""] for number, title, page, idea in BEFORE_PHASES
    ]
    for name in phase_names():
        phase = find_phase(name).PHASE
        page = f"phases/{name.partition('_')[2]}.md"
        rows.append([f"[{phase.number}: {phase.title}]({page})", phase.idea, _headline(phase.number)])
    return table(["phase", "the one idea", "measured"], rows, "lll")


def _headline(phase: int) -> str:
    if phase == SPECULATIVE:
        times = measured_cell("speculative", "phase 9 ÷ phase 10", "edit, 1")
        return f"tokens of phase 9 × {times}, for edited code and one client"
    if phase not in HEADLINE_RATIOS:
        return ""
    name, against, *compared = HEADLINE_RATIOS[phase]
    return f"{name} {ratio(*compared)} against {against}"


def ratio(
    workload: str,
    before: str,
    after: str,
    line: str,
    model: str = "dummy:llama-60m",
    results: Path = RESULTS,
) -> str:
    """Return the ratio of a metric in the newest comparison of two servers, for a sentence: the value of `after`
    divided by the value of `before`, such as `×0.45`."""
    found = dict(model_ratios(workload, before, after, line, results))
    return f"×{found[model]:.2f}" if model in found else NOT_MEASURED


def criterion(
    *asked: tuple[str, str, str, str, str], model: str | None = None, results: Path = RESULTS
) -> str:
    """Return the last two cells of a table row about a criterion (bounds for measured ratios): whether the ratios
    keep their bounds, and the ratios beside their bounds.

    Args:
        asked: for each ratio the arguments `workload`, `before`, `after` and `line` of `ratio`, then its bound,
            such as `≥ 1.25`.
        model: the one model whose ratios must keep the bounds; None: every model that was measured.
    """
    kept: list[bool] = []
    shown: list[str] = []
    for workload, before, after, line, bound in asked:
        found = [
            (name, value)
            for name, value in model_ratios(workload, before, after, line, results)
            if model in {None, name}
        ]
        kept += [_keeps(value, bound) for _, value in found]
        said = ", ".join(f"×{value:.2f} (`{name}`)" for name, value in found) or NOT_MEASURED
        shown.append(f"`{workload}`: {line} {said} (asked: {bound})")
    return _criterion(kept, shown)


def cells_criterion(table: str, column: str, *asked: tuple[str, str]) -> str:
    """Like `criterion`, for cells of one column of a measured table.

    Args:
        table: the table's name.
        column: the heading of the column.
        asked: for each cell the first cell of its row, and a bound.
    """
    cells = [(row, measured_cell(table, column, row), bound) for row, bound in asked]
    shown = [f"{row}: {value} (asked: {bound})" for row, value, bound in cells]
    return _criterion(
        [_keeps(float(value), bound) for _, value, bound in cells if value != NOT_MEASURED], shown
    )


def _keeps(value: float, bound: str) -> bool:
    """Return whether a value keeps a bound such as `≥ 1.25`. The value is rounded first, as it is shown."""
    sign, number = bound.split()
    return round(value, 2) >= float(number) if sign == "≥" else round(value, 2) <= float(number)


def _criterion(kept: Sequence[bool], shown: Sequence[str]) -> str:
    status = ("met" if all(kept) else "**missed**") if kept else "not measured"
    return f"{status} | {'<br>'.join(shown)}"


def model_ratios(
    workload: str, before: str, after: str, line: str, results: Path = RESULTS
) -> Iterator[tuple[str, float]]:
    """Yield each model, and the ratio in its newest comparison of two servers with at least `REPEATS` repeats."""
    asked = next(each for each in LINES if each.title == line)
    for model, group in newest_groups(workload, before, after, results).items():
        columns = {runs[0].server.label: runs for runs in columns_of(group.runs)}
        old, new = median_of(columns[before], asked), median_of(columns[after], asked)
        if old and new is not None:
            yield model, new / old


def newest_groups(workload: str, before: str, after: str, results: Path = RESULTS) -> dict[str, Together]:
    """Return each model's newest published comparison of two servers with at least `REPEATS` repeats, by model."""
    newest: dict[str, Together] = {}
    for group in complete_groups(results):
        run = group.first
        fits = run.workload.name == workload and {before, after} <= set(group.labels)
        if fits and not run.workload.quick and not group.local and group.repeats >= REPEATS:
            newest.setdefault(run.server.model, group)
    return newest


def folded_table(name: str, title: str = "All numbers", results: Path = RESULTS) -> str:
    """Return a measured table in a box that opens on a click."""
    return folded(title, measured_table(name, results))


def story_picture(
    workload: str, *labels: str, first: str, root: str, results: Path = RESULTS, folder: Path = PLOTS
) -> str:
    """Return one figure of a workload's newest comparison of these servers; "" if it was not drawn.

    Args:
        labels: the labels of the servers.
        first: the kind of the figure, such as `stall`.
        root: the relative path from the page to the site's root.
    """
    found = chosen(workload, labels, results)[:1]
    entries = [entry for group in found for entry in _drawn(group, labels, folder)]
    return "".join(picture(entry, root) for entry in entries if entry["figure"] == first)


def pictures_of(group: Together, root: str, folder: Path = PLOTS) -> str:
    """Return all figures that were drawn of a comparison, in a box that opens on a click; "" if there are none."""
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
    """Return a figure as Markdown: its light and its dark image, and its caption."""
    width, height = entry["size"]
    # The size lets the browser reserve the figure's place before the figure is loaded.
    shape = f"loading=lazy width={width} height={height}"
    images = "\n".join(
        f"![{entry['title']}]({root}assets/plots/{entry['files'][theme]}){{ .plot .only-{theme} {shape} }}"
        for theme in ("light", "dark")
    )
    return f"{images}\n\n**{entry['title']}.** {entry['caption']}\n{{: .plot-caption }}\n"


def _opening(group: Together, labels: Sequence[str], first: str, root: str, folder: Path) -> str:
    entries = _drawn(group, labels, folder)
    shown = _shown_first(entries, first)
    parts = [picture(entry, root) for entry in entries if entry["figure"] == shown]
    if parts and entries[0]["comparison"] != group.first.comparison:
        parts.append(
            "(The picture is of an earlier comparison, with more servers; the numbers are of the latest.)\n"
        )
    numbers = compared_table(group, *labels) if len(labels) == 2 else _all_servers(group)
    return "\n".join([*parts, f"{setup_of(group)}\n\n{numbers}"])


def _others(group: Together, labels: Sequence[str], first: str, root: str, folder: Path) -> str:
    entries = _drawn(group, labels, folder)
    shown = _shown_first(entries, first)
    parts = [picture(entry, root) for entry in entries if entry["figure"] != shown]
    if set(group.labels) != set(labels):
        parts.insert(0, f"All servers of this comparison:\n\n{_all_servers(group)}")
    return "\n".join(parts)


def _all_servers(group: Together) -> str:
    lines = [line for line in LINES if line.title in HEADLINES]
    return group_table(group, lines) + unmeasured(group)


def _shown_first(entries: Sequence[Entry], first: str) -> str:
    """Return `first` if there is a figure of this kind, else `BARS`: without timelines, few kinds are drawn."""
    return first if any(entry["figure"] == first for entry in entries) else BARS


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
