"""Measurements on pages, from `benchmarks/results`: tables, figures, single numbers, and criteria for them.

A page that asks for a measurement or for a figure that is not there stops the build of the site.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.files import Together, load_comparisons
from benchmarks.report import LINES, Line, bases_of, cells_of, columns_of, median_of, medians_of, repetition
from benchmarks.results import Run, is_complete
from benchmarks.tables import MeasuredTable, load_tables, show
from docs.building.markdown import folded, indented, table

Figure = dict[str, Any]  # an entry of `captions.json`, which `benchmarks.plots` writes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "assets" / "plots"

BARS = "bars"  # the kind of figure that every comparison has; other kinds need the times of each token
SPEEDS = ("output tokens / s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "longest stall")
HEADLINES = (
    *(*SPEEDS, "SLO attainment", "mean batch", "wasted work"),
    *("KV used, mean tokens", "KV reserved, mean tokens", "prompt tokens found in cache"),
)
SWEEP = (*SPEEDS, "engine steps", "mean batch", "preemptions")

REPEATS = 3  # fewest runs of each server for a ratio or a verdict: with fewer, a difference may be chance
VERDICTS = (
    "*Better* or *worse*: all runs of one server are on the same side of all runs of the other. *Alike*: their "
    "runs overlap, so the difference of their medians may be chance."
)


class NotMeasuredError(LookupError):
    """A page asks for a measurement or a figure that is not there."""


# ---------------------------------------------------------------------- macros: comparisons of servers


def measured_section(workload: str, *labels: str, first: str, chats: str = "", root: str = "../") -> str:
    """Return one figure and one table of a workload's newest comparisons of these servers, a tab for each model.

    Args:
        labels: the labels of the servers. If there are two, the table says which metrics became better or worse.
        first: the kind of the figure, such as `stall` (`benchmarks.plots.figures`). The first tab must have it.
            Other tabs have bars instead if their comparison has no times of tokens.
        chats: the workload that shows the same effect with a model that chats; "" for none.
        root: the relative path from the page to the site's root.
    """
    parts = []
    for place, group in enumerate(_chosen(workload, chats, labels)):
        kind = first if place == 0 else _kind(group, first)
        numbers = _compared_table(group, *labels) if len(labels) == 2 else _all_servers(group)
        parts.append((group, f"{_picture(_figure(group, kind), root)}\n{_setup(group)}\n\n{numbers}"))
    return _tabs(parts)


def measured_rest(workload: str, *labels: str, first: str, chats: str = "", root: str = "../") -> str:
    """Return the figures and servers that `measured_section` with the same arguments leaves out."""
    parts = []
    for place, group in enumerate(_chosen(workload, chats, labels)):
        kind = first if place == 0 else _kind(group, first)
        texts = [_picture(figure, root) for figure in _figures(group) if figure["figure"] != kind]
        if set(group.labels) != set(labels):
            texts.insert(0, f"All servers of this comparison:\n\n{_all_servers(group)}")
        parts.append((group, "\n".join(texts)))
    return _tabs(parts)


def measured_figure(workload: str, *labels: str, first: str, root: str = "../") -> str:
    """Return one figure of a workload's newest comparison of these servers."""
    return _picture(_figure(_chosen(workload, "", labels)[0], first), root)


def sweep_table(workload: str, *options: str) -> str:
    """Return the table of each model's newest sweep over exactly these options.

    The reader's own newest sweep has a table beside the published one.
    """
    found: dict[tuple[bool, str], Together] = {}
    for group in _complete_comparisons(RESULTS):
        if group.first.workload.name == workload and group.swept == set(options):
            found.setdefault((group.local, group.first.server.model), group)
    if not found:
        raise NotMeasuredError(f"no sweep of {workload} over {', '.join(options)}")
    return "\n".join(
        f"{_setup(group)}\n\n{_turned_table(group)}"
        for _, group in sorted(found.items(), key=lambda item: item[0])
    )


def peers_tables() -> str:
    """Return the newest comparison with other servers for each workload, model and results folder.

    Our own loop without a server, `generate()`, does not count as another server.
    """
    found: dict[tuple[str, str, str], Together] = {}
    for group in _full_comparisons():
        ours = [label.startswith(("phase ", "generate()")) for label in group.labels]
        if any(ours) and not all(ours):
            run = group.first
            found.setdefault((run.workload.name, group.folder, run.server.model), group)
    return "\n".join(
        folded(f"{workload}: {', '.join(group.labels)}", f"{_setup(group)}\n\n{_all_servers(group)}")
        for (workload, *_), group in sorted(found.items(), key=lambda item: item[0])
    )


def ratio(workload: str, before: str, after: str, metric: str, model: str = "dummy:llama-60m") -> str:
    """Return a metric of server `after` divided by that of `before`, for a sentence: `×0.45`."""
    return f"×{dict(_ratios(workload, before, after, metric))[model]:.2f}"


def criterion(*asked: tuple[str, str, str, str, str], model: str | None = None) -> str:
    """Return the last two cells of a table row about a criterion (bounds for measured ratios): whether the ratios
    keep their bounds, and the ratios beside their bounds.

    Args:
        asked: for each ratio the arguments `workload`, `before`, `after` and `metric` of `ratio`, then its bound,
            such as `≥ 1.25`.
        model: the one model whose ratios must keep the bounds; None: every model that was measured.
    """
    kept: list[bool] = []
    shown: list[str] = []
    for workload, before, after, metric, bound in asked:
        found = [
            (name, value) for name, value in _ratios(workload, before, after, metric) if model in {None, name}
        ]
        kept += [_keeps(value, bound) for _, value in found]
        said = ", ".join(f"×{value:.2f} (`{name}`)" for name, value in found)
        shown.append(f"`{workload}`: {metric} {said} (asked: {bound})")
    return f"{'met' if all(kept) else '**missed**'} | {'<br>'.join(shown)}"


# ---------------------------------------------------------------------- macros: measured tables


def measured_table(name: str) -> str:
    """Return all measured tables called `name`, newest first, each below a sentence on its setup."""
    found = [each for each in load_tables(RESULTS) if each.name == name]
    if not found:
        raise NotMeasuredError(f"no measured table {name}")
    return "\n".join(map(_described, found))


def folded_table(name: str, title: str = "All numbers") -> str:
    """Return a measured table in a box that opens on a click."""
    return folded(title, measured_table(name))


def measured_cell(name: str, column: str, *row: str | float) -> str:
    """Return one cell of a measured table for a sentence, from the first row that begins with the cells `row`."""
    measured = newest_table(name)
    place = measured.columns.index(column)
    return next(show(cells[place]) for cells in measured.rows if tuple(cells[: len(row)]) == row)


def newest_table(name: str) -> MeasuredTable:
    """Return the newest published table called `name`; without one, the reader's own newest table."""
    found = [each for each in load_tables(RESULTS) if each.name == name]
    if not found:
        raise NotMeasuredError(f"no measured table {name}")
    return min(found, key=lambda each: each.local)


def fold(title: str, caller: Callable[[], str]) -> str:
    """Return the body of a call block in a box that opens on a click: `{% call fold("More") %} … {% endcall %}`."""
    return folded(title, caller())


# ---------------------------------------------------------------------- which comparison


@functools.cache
def _complete_comparisons(results: Path) -> tuple[Together, ...]:
    """Return the comparisons that have all their runs, newest first. Pages show no other comparisons."""
    return tuple(each for each in reversed(load_comparisons(results)) if is_complete(each.runs))


def _full_comparisons() -> list[Together]:
    """Return the complete comparisons, newest first, without sweeps and quick ones."""
    found = _complete_comparisons(RESULTS)
    return [group for group in found if not (group.swept or group.first.workload.quick)]


def _chosen(workload: str, chats: str, labels: Sequence[str]) -> list[Together]:
    """Return for each model and folder of results the newest full comparison of a workload with all these servers.

    Comparisons are sorted by the number of repeats, then by the number of servers, the largest first. Those of the
    workload `chats` follow those of `workload`.
    """
    found: list[Together] = []
    for name in filter(None, (workload, chats)):
        newest_by: dict[tuple[str, str], Together] = {}
        for group in _full_comparisons():
            if group.first.workload.name == name and set(labels) <= set(group.labels):
                newest_by.setdefault((group.folder, group.first.server.model), group)
        kept = [newest_by[key] for key in sorted(newest_by)]
        found += sorted(kept, key=lambda group: (-group.repeats, -len(group.labels)))
        if not kept:
            raise NotMeasuredError(f"no full comparison of {name} with {', '.join(labels)}")
    return found


def _ratios(workload: str, before: str, after: str, metric: str) -> Iterator[tuple[str, float]]:
    """Yield each model, and the ratio in its newest published comparison of two servers, of at least `REPEATS`
    repeats. Variants of a phase's options count as servers."""
    asked = next(each for each in LINES if each.title == metric)
    newest_by: dict[str, Together] = {}
    for group in _complete_comparisons(RESULTS):
        run = group.first
        fits = run.workload.name == workload and {before, after} <= set(group.labels)
        if fits and not run.workload.quick and not group.local and group.repeats >= REPEATS:
            newest_by.setdefault(run.server.model, group)
    if not newest_by:
        raise NotMeasuredError(f"no comparison of {workload} with {before} and {after}")
    for model, group in newest_by.items():
        columns = {runs[0].server.label: runs for runs in columns_of(group.runs)}
        old, new = median_of(columns[before], asked), median_of(columns[after], asked)
        if old and new is not None:
            yield model, new / old


def _keeps(value: float, bound: str) -> bool:
    """Return whether a value keeps a bound such as `≥ 1.25`. The value is rounded first, as it is shown."""
    sign, number = bound.split()
    return round(value, 2) >= float(number) if sign == "≥" else round(value, 2) <= float(number)


# ---------------------------------------------------------------------- figures


def _figures(group: Together) -> list[Figure]:
    """Return the figures that were drawn of a comparison."""
    index = PLOTS / "captions.json"
    if not index.is_file():
        raise NotMeasuredError("no figure was drawn: `make plots` draws them")
    run = group.first
    shown = run.comparison, run.workload.name, run.server.model, run.workload.quick
    return [
        each
        for each in json.loads(index.read_text(encoding="utf-8")).values()
        if (each["comparison"], each["workload"], each["model"], each["quick"]) == shown
    ]


def _kind(group: Together, first: str) -> str:
    return first if any(each["figure"] == first for each in _figures(group)) else BARS


def _figure(group: Together, kind: str) -> Figure:
    for each in _figures(group):
        if each["figure"] == kind:
            return each
    run = group.first
    raise NotMeasuredError(
        f"no figure {kind} of comparison {run.comparison}: {run.workload.name}, {run.server.model}"
    )


def _picture(figure: Figure, root: str) -> str:
    """Return a figure as Markdown: its light and its dark image, and its caption."""
    width, height = figure["size"]
    # The size lets the browser reserve the figure's place before the figure is loaded.
    shape = f"loading=lazy width={width} height={height}"
    images = "\n".join(
        f"![{figure['title']}]({root}assets/plots/{figure['files'][theme]}){{ .plot .only-{theme} {shape} }}"
        for theme in ("light", "dark")
    )
    return f"{images}\n\n**{figure['title']}.** {figure['caption']}\n{{: .plot-caption }}\n"


# ---------------------------------------------------------------------- tables


def _tabs(parts: Sequence[tuple[Together, str]]) -> str:
    """Return a tab for each comparison that has text. If only one has text, the text is returned without a tab."""
    shown = [(group, text) for group, text in parts if text]
    if len(shown) == 1:
        return shown[0][1]
    return "\n".join(f'=== "{_tab_title(group)}"\n\n{indented(text)}\n' for group, text in shown)


def _tab_title(group: Together) -> str:
    model = group.first.server.model.removeprefix("dummy:")
    return f"{model} ({group.folder})" if group.folder else model


def _compared_table(group: Together, before: str, after: str) -> str:
    """Return a table of two servers, with a verdict on each metric.

    A metric is better or worse only if the repeats agree: all values of one server lie above all values of the
    other. If either server has fewer than `REPEATS` complete runs, there is no verdict.
    """
    columns = {repeats[0].server.label: _complete(repeats) for repeats in columns_of(group.runs)}
    old_runs, new_runs = columns[before], columns[after]
    has_verdict = min(len(old_runs), len(new_runs)) >= REPEATS
    rows = []
    for line in (line for line in LINES if line.title in HEADLINES):
        old, new = median_of(old_runs, line), median_of(new_runs, line)
        if old is None or new is None:
            continue
        verdict = ""
        if has_verdict and line.better:
            verdict = "alike"
            if _beyond_repeats(line, old_runs, new_runs):
                verdict = "**worse**" if line.is_worse(old, new) else "better"
        rows.append([line.title, line.show(old), line.show(new), f"×{new / old:.2f}" if old else "", verdict])
    compared = table(["metric", before, after, "ratio", "verdict"], rows, "lrrrl")
    return f"{compared}\n{VERDICTS}\n" if has_verdict else compared


def _beyond_repeats(line: Line, old_runs: Sequence[Run], new_runs: Sequence[Run]) -> bool:
    """Return whether all repeats of one server lie on the same side of all repeats of the other."""
    old, new = (
        [value for run in runs if (value := line.value(run)) is not None] for runs in (old_runs, new_runs)
    )
    return min(new) > max(old) or max(new) < min(old)


def _all_servers(group: Together) -> str:
    """Return a table with a column for each server, with ratios to the server that each is compared with, and the
    reason why a server has no complete run."""
    columns = columns_of(group.runs)
    text = table(["metric", *group.labels], _measured(group, HEADLINES, bases_of(columns)))
    for repeats in columns:
        if not _complete(repeats):
            text += f"\n{repeats[0].server.label} has no complete run: {repeats[0].reason}.\n"
    return text


def _turned_table(group: Together) -> str:
    """Return a table with a row for each server, to compare some metrics over many settings."""
    head, *rows = zip(*_measured(group, SWEEP, [None] * len(group.labels)), strict=True)
    return table(["server", *head], [[label, *row] for label, row in zip(group.labels, rows, strict=True)])


def _measured(group: Together, titles: Sequence[str], bases: Sequence[int | None]) -> list[list[str]]:
    """Return the title and the cells of each of these metrics that any server has. The best values are bold."""
    found = [(line, medians_of(columns_of(group.runs), line)) for line in LINES if line.title in titles]
    return [
        [line.title, *cells_of(line, values, bases, strong="**{}**")]
        for line, values in found
        if any(value is not None for value in values)
    ]


def _complete(repeats: Sequence[Run]) -> list[Run]:
    return [run for run in repeats if run.status == "ok"]


# ---------------------------------------------------------------------- how it was measured


def _setup(group: Together) -> str:
    """Return a comparison's machine, versions and load as a sentence."""
    run = group.first
    facts = [
        f"**{run.server.model}** on {_place(run.environment, local=group.local)}",
        str((run.server.version or {}).get("dtype", "")),
        f"{run.workload.rate:.3g} requests a second" if run.workload.rate is not None else "",
        f"table's rate × {run.calibration.factor:.3g}" if run.workload.rate and run.calibration else "",
        f"median of {group.repeats} runs" if group.repeats > 1 else "one run",
        "quick" if run.workload.quick else "",
        f"seed {run.workload.seed}",
        *_software(run.environment),
        run.started_at[:10],
    ]
    return " ".join([", ".join(fact for fact in facts if fact) + ".", repetition(group.runs)]).rstrip()


def _described(measured: MeasuredTable) -> str:
    """Return a sentence on the setup of a measured table, and the table."""
    facts = [
        f"**{measured.title}** on {_place(measured.environment, local=measured.local)}",
        *(f"{name} {value}" for name, value in measured.setup.items()),
        *_software(measured.environment),
        measured.started_at[:10],
    ]
    columns = zip(*measured.rows, strict=True)
    align = "".join("l" if all(isinstance(cell, str) for cell in column) else "r" for column in columns)
    rows = [[show(cell) for cell in row] for row in measured.rows]
    return f"{', '.join(facts)}.\n\n{table(measured.columns, rows, align)}"


def _place(environment: dict[str, Any], *, local: bool) -> str:
    """Return the machine, and `measured in this checkout` if the results are the reader's own."""
    cpu = f"{environment.get('cpu', 'unknown CPU')}, {environment.get('cores')} cores"
    return (environment.get("gpu") or cpu) + (", measured in this checkout" if local else "")


def _software(environment: dict[str, Any]) -> list[str]:
    torch, git = environment.get("packages", {}).get("torch"), environment.get("git")
    return [*([f"torch {torch}"] if torch else []), *([f"revision `{git}`"] if git else [])]
