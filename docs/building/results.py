"""Tables of measurements, made from `benchmarks/results` when the site is built.

If there are no results, every page is still built, and says how to measure.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.files import Together, load_comparisons
from benchmarks.report import (
    FIRST_PEER,
    LINES,
    Line,
    Value,
    bases_of,
    cells_of,
    columns_of,
    median_of,
    medians_of,
    repetition,
)
from benchmarks.results import Run, is_complete
from benchmarks.tables import MeasuredTable, load_tables, show
from benchmarks.workloads import CHAT_WORKLOADS
from docs.building.markdown import folded, table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "assets" / "plots"

SPEEDS = ("output tokens / s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "longest stall")

HEADLINES = (
    *SPEEDS,
    "SLO attainment",
    "mean batch",
    "wasted work",
    "KV used, mean tokens",
    "KV reserved, mean tokens",
    "prompt tokens found in cache",
)

VERDICT_RUNS = 3  # fewest runs of each server for a verdict
VERDICTS = (
    "*Better* or *worse*: all runs of one server are on the same side of all runs of the other. *Alike*: their "
    "runs overlap, so the difference of their medians may be chance."
)

SWEEP_LINES = (
    *SPEEDS,
    "engine steps",
    "mean batch",
    "preemptions",
)


@functools.cache
def groups(results: Path = RESULTS) -> tuple[Together, ...]:
    """Return all comparisons below the folder of results, newest first."""
    return tuple(reversed(load_comparisons(results)))


def complete_groups(results: Path) -> list[Together]:
    """Return the comparisons that have all their runs. Pages show no other comparisons."""
    return [group for group in groups(results) if is_complete(group.runs)]


def full_comparisons(results: Path) -> list[Together]:
    """Return the complete comparisons, newest first, without sweeps and quick ones."""
    return [group for group in complete_groups(results) if not (group.swept or group.first.workload.quick)]


def chosen(workload: str, labels: Sequence[str], results: Path) -> list[Together]:
    """Return for each model and folder of results the newest full comparison of a workload with all these servers.

    Comparisons are sorted by the number of repeats, then by the number of servers, the largest first.
    """
    kept: dict[tuple[str, str], Together] = {}
    for group in full_comparisons(results):
        if group.first.workload.name == workload and set(labels) <= set(group.labels):
            kept.setdefault((group.folder, group.first.server.model), group)
    found = [kept[key] for key in sorted(kept)]
    return sorted(found, key=lambda group: (-group.repeats, -len(group.labels)))


def missing(workload: str, labels: Sequence[str]) -> str:
    numbers = ",".join(label.removeprefix("phase ") for label in labels)
    return (
        f'!!! note "Not measured yet"\n\n    The results folder has no full run of `{workload}` on '
        f"{' and '.join(labels)}. On an idle machine, this makes them, and this page shows them when the site "
        "is built next:\n\n"
        f"    ```sh\n    .venv/bin/python -m benchmarks compare --phases {numbers} --workload {workload}\n"
        "    .venv/bin/python -m benchmarks plots\n    ```\n"
    )


def sweep_table(workload: str, *options: str, results: Path = RESULTS) -> str:
    """Return the table of each model's newest sweep over exactly these options, or a sentence if there is none.

    The reader's own newest sweep has a table beside the published one.
    """
    found: dict[tuple[bool, str], Together] = {}
    for group in complete_groups(results):
        if group.first.workload.name == workload and group.swept == set(options):
            found.setdefault((group.local, group.first.server.model), group)
    if found:
        return "\n".join(
            f"{setup_of(group)}\n\n{turned_table(group, SWEEP_LINES)}"
            for _, group in sorted(found.items(), key=lambda item: item[0])
        )
    return f"No sweep over {' and '.join(f'`{option}`' for option in options)} has been measured yet.\n"


def peers_tables(results: Path = RESULTS) -> str:
    """Return the newest comparison with other servers for each workload, model and results folder, or a sentence.

    Our own loop without a server, `generate()`, does not count as another server.
    """
    found: dict[tuple[str, str, str], Together] = {}
    for group in full_comparisons(results):
        run = group.first
        ours = [label.startswith(("phase ", "generate()")) for label in group.labels]
        if any(ours) and not all(ours):
            found.setdefault((run.workload.name, group.folder, run.server.model), group)
    if not found:
        return "No comparison with another server has been measured yet.\n"
    lines = [line for line in LINES if line.title in HEADLINES]
    return "\n".join(
        folded(
            f"{workload}: {', '.join(group.labels)}",
            f"{setup_of(group)}\n\n{group_table(group, lines)}{unmeasured(group)}",
        )
        for (workload, *_), group in sorted(found.items(), key=lambda item: item[0])
    )


def machine_table(workload: str, folder: str, results: Path = RESULTS) -> str:
    """Return the table of a workload's newest comparison in one machine's folder, with a row for each server.

    If several models were measured, the comparison with the most repeats is shown.
    """
    found = [each for each in chosen(workload, (), results) if each.folder == folder]
    if not found:
        return f"No comparison of `{workload}` has been measured on {folder} yet.\n"
    return f"{setup_of(found[0])}\n\n{turned_table(found[0], SPEEDS)}"


def chat_answers(results: Path = RESULTS) -> str:
    """Return the table of the mean length of answers and the share of prompt tokens found in the cache, for chats.

    Each row has a workload of chats. Its numbers are those of the last phase in the newest published comparison.
    """
    rows = []
    for name, workload in CHAT_WORKLOADS.items():
        fitting = [each for each in full_comparisons(results) if each.first.workload.name == name]
        for group in [each for each in fitting if not each.local][:1]:
            *_, last = (repeats for repeats in columns_of(group.runs) if repeats[0].server.order < FIRST_PEER)
            answers = [m.output_tokens / m.completed for run in last if (m := run.metrics) and m.completed]
            found = [m.cached_share for run in last if (m := run.server_metrics)]
            lengths = workload.new_tokens
            cells = [f"`{name}`", group.first.server.model, f"{(lengths.low + lengths.high) / 2:.0f}"]
            cells += [f"{statistics.mean(answers):.0f}", f"{statistics.median(found):.0%}"]
            rows.append([*cells, last[0].server.label])
    if not rows:
        return "No workload of a model that chats has been measured yet.\n"
    head = [
        "workload",
        "model",
        "mean limit, tokens",
        "mean answer, tokens",
        "of the prompts in the cache",
        "server",
    ]
    return table(head, rows, "llrrrl")


def measured_table(name: str, results: Path = RESULTS, *, program: str | None = None) -> str:
    """Return all measured tables called `name`, newest first, or a sentence if there are none.

    Args:
        name: the tables' name.
        program: the module that measures such a table; `benchmarks micro NAME` if None.
    """
    found = [each for each in load_tables(results) if each.name == name]
    if not found:
        return f"Not measured yet: `.venv/bin/python -m {program or f'benchmarks micro {name}'}` does it.\n"
    return "\n".join(map(described, found))


def compared_table(group: Together, before: str, after: str) -> str:
    """Return a table of two servers, with a verdict on each metric.

    A metric is better or worse only if the repeats agree: all values of one server lie above all values of the
    other. If either server has fewer than three complete runs, there is no verdict: the difference may be chance.
    """
    columns = {repeats[0].server.label: _complete(repeats) for repeats in columns_of(group.runs)}
    old_runs, new_runs = columns[before], columns[after]
    has_verdict = min(len(old_runs), len(new_runs)) >= VERDICT_RUNS
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
        ratio = f"×{new / old:.2f}" if old else ""
        rows.append([line.title, line.show(old), line.show(new), ratio, verdict])
    compared = table(["metric", before, after, "ratio", "verdict"], rows, "lrrrl")
    return f"{compared}\n{VERDICTS}\n" if has_verdict else compared


def _beyond_repeats(line: Line, old_runs: Sequence[Run], new_runs: Sequence[Run]) -> bool:
    """True if all repeats of one server lie on the same side of all repeats of the other."""
    old, new = (
        [value for run in runs if (value := line.value(run)) is not None] for runs in (old_runs, new_runs)
    )
    return min(new) > max(old) or max(new) < min(old)


# ---------------------------------------------------------------------- parts


def _place(environment: dict[str, Any], *, local: bool) -> str:
    """Return the machine, and `measured in this checkout` if the results are the reader's own."""
    return _machine(environment) + (", measured in this checkout" if local else "")


def _machine(environment: dict[str, Any]) -> str:
    cpu = f"{environment.get('cpu', 'unknown CPU')}, {environment.get('cores')} cores"
    return environment.get("gpu") or cpu


def _software(environment: dict[str, Any]) -> list[str]:
    torch, git = environment.get("packages", {}).get("torch"), environment.get("git")
    return [*([f"torch {torch}"] if torch else []), *([f"revision `{git}`"] if git else [])]


def described(measured: MeasuredTable) -> str:
    """Return a sentence on the setup of a measured table, and the table."""
    facts = [
        f"**{measured.title}** on {_place(measured.environment, local=measured.local)}",
        *(f"{name} {value}" for name, value in measured.setup.items()),
        *_software(measured.environment),
        measured.started_at[:10],
    ]
    texts = [
        all(isinstance(row[place], str) for row in measured.rows) for place in range(len(measured.columns))
    ]
    align = "".join("l" if text else "r" for text in texts)
    rows = [[show(cell) for cell in row] for row in measured.rows]
    return f"{', '.join(facts)}.\n\n{table(measured.columns, rows, align)}"


def setup_of(group: Together) -> str:
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


def _complete(repeats: Sequence[Run]) -> list[Run]:
    return [run for run in repeats if run.status == "ok"]


def values_of(group: Together, line: Line) -> list[Value]:
    return medians_of(columns_of(group.runs), line)


def group_table(group: Together, lines: Sequence[Line]) -> str:
    """Return a table with a column for each server, and ratios to the server that each is compared with."""
    return table(["metric", *group.labels], _measured(group, lines, bases_of(columns_of(group.runs))))


def unmeasured(group: Together) -> str:
    """Return a sentence for each server that has no complete run, with the reason of its first run."""
    return "".join(
        f"\n{repeats[0].server.label} has no complete run: {repeats[0].reason}.\n"
        for repeats in columns_of(group.runs)
        if not _complete(repeats)
    )


def turned_table(group: Together, titles: Sequence[str]) -> str:
    """Return a table with a row for each server, to compare some metrics over many settings."""
    lines = [line for line in LINES if line.title in titles]
    head, *rows = zip(*_measured(group, lines, [None] * len(group.labels)), strict=True)
    return table(["server", *head], [[label, *row] for label, row in zip(group.labels, rows, strict=True)])


def _measured(group: Together, lines: Sequence[Line], bases: Sequence[int | None]) -> list[list[str]]:
    """Return the title and the cells of each metric that any server has. The best values are bold."""
    found = [(line, values_of(group, line)) for line in lines]
    return [
        [line.title, *cells_of(line, values, bases, strong="**{}**")]
        for line, values in found
        if any(value is not None for value in values)
    ]
