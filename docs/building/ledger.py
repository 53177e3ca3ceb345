"""The ledger: every complete comparison, with its pictures and the metrics in which a server is worse than the
server that it is compared with."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from benchmarks.files import Together
from benchmarks.report import LINES, bases_of, columns_of
from benchmarks.results import is_complete
from benchmarks.tables import load_tables
from docs.building.results import (
    RESULTS,
    complete_groups,
    described,
    group_table,
    groups,
    setup_of,
    values_of,
)
from docs.building.stories import pictures_of


def ledger(results: Path = RESULTS) -> str:
    """Return all complete comparisons with their setups and metrics, newest first, then all measured tables."""
    found, tables = complete_groups(results), load_tables(results)
    if not groups(results) and not tables:
        return (
            "The results folder is empty: nothing has been measured in this checkout. "
            "[Benchmarks](benchmarks.md) says how to measure.\n"
        )
    files = sum(len(group.runs) for group in found)
    parts = [f"{files} runs in {len(found)} comparisons.\n", _cut_short(results)]
    for group in found:
        run = group.first
        quick = ", quick" if run.workload.quick else ""
        where = f" ({group.folder})" if group.folder else ""
        parts.append(
            f"## {run.started_at[:10]}: {run.workload.name}{quick}, {run.server.model}{where}\n\n"
            f"{setup_of(group)}\n\n{group_table(group, LINES)}\n{_losses(group)}{_remarks(group)}"
            f"\n{pictures_of(group, root='')}"
        )
    parts += [f"## {table.started_at[:10]}: {table.name}\n\n{described(table)}" for table in tables]
    return "\n".join(parts)


def _cut_short(results: Path) -> str:
    """Return a sentence that names the incomplete comparisons, which no page shows; "" if there are none."""
    named = [
        f"`{group.first.workload.name}` of {group.first.started_at[:10]} ({len(group.runs)} runs)"
        for group in groups(results)
        if not is_complete(group.runs)
    ]
    return f"Cut short, and left out everywhere: {', '.join(named)}.\n" if named else ""


def _losses(group: Together) -> str:
    """Return a sentence for each server that is worse in some metric than the server it is compared with. The
    sentence names these metrics."""
    worse: dict[str, list[str]] = defaultdict(list)
    for line in LINES:
        values = values_of(group, line)
        for label, base, value in zip(group.labels, bases_of(columns_of(group.runs)), values, strict=True):
            before = None if base is None else values[base]
            if value is not None and before and line.is_worse(before, value):
                worse[label].append(f"{line.title} ×{value / before:.2f}")
    return "".join(
        f"\nWhere {label} is worse than what it is compared to: {', '.join(lines)}.\n"
        for label, lines in worse.items()
    )


def _remarks(group: Together) -> str:
    """Return the options of each server, and the notes on single runs."""
    said = []
    for repeats in columns_of(group.runs):
        info = repeats[0].server
        if info.options:
            said.append(f"- {info.label}: `{' '.join(f'--{k} {v}' for k, v in info.options.items())}`")
    for run in group.runs:
        notes = [*run.notes, *([run.reason] if run.reason else [])]
        if run.status != "ok" or notes:
            said.append(f"- {run.server.label}, run {run.repeat}, {run.status}: {'; '.join(notes)}")
    return "\n" + "\n".join(said) + "\n" if said else ""
