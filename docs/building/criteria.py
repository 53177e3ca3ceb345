"""What a phase had to do before it counted as done, and whether it does: `criteria.toml`, tests and results."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import LINES, columns_of, median_of
from benchmarks.tables import load_tables
from docs.building.results import RESULTS, Group, complete_groups

ROOT = Path(__file__).resolve().parents[2]
CRITERIA = Path(__file__).with_name("criteria.toml")
REPEATS = 3  # of each server: fewer say little about chance


@dataclass(frozen=True, slots=True)
class Criterion:
    """An entry of the file; see there."""

    says: str
    tests: list[str] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    open: str = ""


def exit_criteria(phase: str, results: Path = RESULTS) -> str:
    """A phase's criteria with their status.

    Raises:
        ValueError: a test that is named does not exist.
    """
    rows = ["| criterion | status | shown by |", "| --- | --- | --- |"]
    for criterion in criteria_of(phase):
        status, shown = judged(criterion, results)
        rows.append(f"| {criterion.says} | {status} | {'<br>'.join(shown)} |")
    return "\n".join(rows) + "\n"


def ratio(
    workload: str,
    before: str,
    after: str,
    line: str,
    model: str = "dummy:llama-60m",
    results: Path = RESULTS,
) -> str:
    """One line of the newest comparison of two servers, such as `×0.45`, for a sentence."""
    asked = {"workload": workload, "before": before, "after": after, "line": line, "model": model}
    found = [value for _, value in _ratios(asked, results)]
    return f"×{found[0]:.2f}" if found else "(not measured yet)"


def criteria_of(phase: str) -> list[Criterion]:
    return [Criterion(**entry) for entry in tomllib.loads(CRITERIA.read_text(encoding="utf-8"))[phase]]


def judged(criterion: Criterion, results: Path = RESULTS) -> tuple[str, list[str]]:
    """A criterion's status, and what shows it."""
    shown = [_test(name) for name in criterion.tests]
    found = [_table(name, results) for name in criterion.tables]
    found += [verdict for asked in criterion.measured for verdict in _compared(asked, results)]
    shown += [said for _, said in found]
    if criterion.open:
        return ("**in part**" if shown else "**unverified**"), [*shown, criterion.open]
    verdicts = {met for met, _ in found}
    if None in verdicts:
        return "**not measured**", shown
    return ("**missed**" if False in verdicts else "met"), shown


def _test(name: str) -> str:
    path, _, function = name.partition("::")
    if not (ROOT / "tests" / path).is_file():
        raise ValueError(f"criteria.toml: there is no tests/{path}")
    if function and function not in _functions(ROOT / "tests" / path):
        raise ValueError(f"criteria.toml: tests/{path} has no {function}")
    return f"`{function}`" if function else f"`tests/{path}`"


@functools.cache
def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _table(name: str, results: Path) -> tuple[bool | None, str]:
    """A measured table shows it, if there is one."""
    there = any(table.name == name for table in load_tables(results))
    return (True if there else None), f"table `{name}`"


def _compared(asked: dict[str, Any], results: Path) -> Iterator[tuple[bool | None, str]]:
    """For each model the newest comparison that answers: whether it is met (None: never measured), and in words."""
    bound = f"≥ {asked['at_least']:g}" if "at_least" in asked else f"≤ {asked['at_most']:g}"
    found = list(_ratios(asked, results))
    for model, value in found:
        met = value >= asked["at_least"] if "at_least" in asked else value <= asked["at_most"]
        yield met, f"`{asked['workload']}`, `{model}`: {asked['line']} ×{value:.2f} (asked: {bound})"
    if not found:
        said = f"{asked['line']}, {asked['after']} against {asked['before']}"
        yield None, f"`{asked['workload']}`: {said} (asked: {bound})"


def _ratios(asked: dict[str, Any], results: Path) -> Iterator[tuple[str, float]]:
    """The newest comparisons of two servers, by model: what a line of the one is over that of the other."""
    before, after = asked["before"], asked["after"]
    line = next(line for line in LINES if line.title == asked["line"])
    newest: dict[str, Group] = {}
    for group in complete_groups(results):
        run = group.first
        fits = run.workload.name == asked["workload"] and {before, after} <= set(group.labels)
        wanted = asked.get("model") in (None, run.server.model)
        if fits and wanted and not run.workload.quick and not group.local and group.repeats >= REPEATS:
            newest.setdefault(run.server.model, group)
    for model, group in newest.items():
        columns = {runs[0].server.label: runs for runs in columns_of(group.runs)}
        old, new = median_of(columns[before], line), median_of(columns[after], line)
        if old and new is not None:
            yield model, new / old
