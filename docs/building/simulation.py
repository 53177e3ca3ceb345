"""Tables of the simulator's page: predictions beside measurements, and simulations of other settings."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.plots.replicas import NAME as REPLICAS
from benchmarks.plots.replicas import series
from benchmarks.report import format_seconds
from benchmarks.tables import newest_table, show
from benchmarks.workloads import WORKLOADS
from docs.building.results import RESULTS
from docs.building.stories import figures
from simulator.__main__ import parser, simulate
from simulator.predict import PREDICTIONS, REASONS, TOLERANCE
from simulator.prices import COSTS, load_fits

Row = dict[str, Any]

THROUGHPUT, TTFT = "output tokens/s", "TTFT p99, s"
NOTHING = "Not there yet: `.venv/bin/python -m simulator.calibrate` makes it.\n"


def _rows(name: str, results: Path) -> list[Row]:
    table = newest_table(name, results)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows] if table is not None else []


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ---------------------------------------------------------------------- predicted and measured


def replayed_steps(results: Path = RESULTS) -> str:
    """Return how many measured steps were replayed, and in how many of them the plan was the measured one."""
    rows = _rows(COSTS, results)
    steps = sum(row["steps measured"] for row in rows)
    alike = sum(round(row["steps measured"] * row["planned alike"]) for row in rows)
    return f"{alike:,} of {steps:,}" if steps else "none yet"


def _off(row: Row, figure: str, kind: str = "predicted") -> float | None:
    predicted = row[f"{figure}, {kind}"]
    return None if predicted is None else predicted / row[f"{figure}, measured"] - 1


def prediction_counts(results: Path = RESULTS) -> str:
    """Return how many of all workloads and servers were predicted well."""
    rows = _rows(PREDICTIONS, results)
    if not rows:
        return NOTHING

    def within(figure: str, kind: str) -> str:
        errors = [off for row in rows if (off := _off(row, figure, kind)) is not None]
        good = sum(abs(error) <= TOLERANCE for error in errors)
        return f"{good} of {len(errors)}"

    held_out = "predicted, held out"
    return _grid(
        [f"within {TOLERANCE:.0%} of what was measured", "throughput", "TTFT p99"],
        [
            ["by prices of all workloads", within(THROUGHPUT, "predicted"), within(TTFT, "predicted")],
            ["by prices of the other workloads", within(THROUGHPUT, held_out), within(TTFT, held_out)],
        ],
    )


def predictions_table(results: Path = RESULTS) -> str:
    """Return the predictions of every workload and server, by machine, model and revision."""
    rows = _rows(PREDICTIONS, results)
    if not rows:
        return NOTHING
    kinds = ("machine", "model", "revision", "kernels")

    def group(row: Row) -> tuple[str, ...]:
        return tuple(row[kind] for kind in kinds)

    order = {name: place for place, name in enumerate(WORKLOADS)}
    rows.sort(key=lambda row: (group(row), order[row["workload"]], row["server"]))
    parts = []
    for (machine, model, revision, kernels), own in itertools.groupby(rows, key=group):
        head = ["workload, server", "tokens/s", "predicted", "off", "TTFT p99", "predicted", "off"]
        title = f"{model}, {machine}, {kernels} kernels, revision {revision}"
        parts.append(_folded(title, _grid([*head, "repeats", "why"], [_prediction(row) for row in own])))
    return "".join(parts)


def _folded(title: str, body: str) -> str:
    return f'??? abstract "{title}"\n\n{textwrap.indent(body, "    ")}\n'


def _prediction(row: Row) -> list[str]:
    def percent(figure: str) -> str:
        off = _off(row, figure)
        assert off is not None
        return f"**{off:+.0%}**" if abs(off) > TOLERANCE else f"{off:+.0%}"

    seconds = [format_seconds(row[f"{TTFT}, {kind}"]) for kind in ("measured", "predicted")]
    tokens = [show(float(row[f"{THROUGHPUT}, {kind}"])) for kind in ("measured", "predicted")]
    apart = (
        f"{row['repeats']}, ×{row[f'{TTFT}, largest repeat / smallest']:.2f}" if row["repeats"] > 1 else "1"
    )
    name = f"{row['workload']}, {row['server']}"
    return [name, *tokens, percent(THROUGHPUT), *seconds, percent(TTFT), apart, row["reason"] or ""]


def reasons_list() -> str:
    """Return the meaning of each word in the last column."""
    return "".join(f"- *{reason}*: {words}.\n" for reason, words in REASONS.items())


def prices_table(results: Path = RESULTS) -> str:
    """Return the prices of a pass by machine."""
    rows = _rows(COSTS, results)
    if not rows:
        return NOTHING
    prices = {
        "a pass": "pass_base, µs",
        "a token chosen": "logit, µs",
        "a row": "row, µs",
        "a column seen": "column, µs",
        "a column held": "held, µs",
        "a prompt token": "token, µs",
        "a pair": "pair, µs",
    }
    body = []
    for row in rows:
        name = f"{row['model']}, {row['machine']}, {row['kernels']}, `{row['revision'][:8]}`, {row['steps']}"
        errors = [
            f"{e:.0%}" if (e := row[f"error of a {what}"]) is not None else "–" for what in ("step", "run")
        ]
        body.append([name, *(show(float(row[column])) for column in prices.values()), *errors])
    return _grid(["µs", *prices, "step off by", "run off by"], body)


# ---------------------------------------------------------------------- other settings


def what_if_table(workload: str, requests: int, *settings: str, phase: str = "7", poisson: float = 0) -> str:
    """Simulate a phase with other settings, and return the table.

    Args:
        settings: options as the command line has them, with commas between several.
    """
    if not load_fits(RESULTS):
        return NOTHING
    given = ["--workload", workload, "--requests", str(requests)]
    given += [f"--variant={phase}:{setting}" for setting in settings]
    given += ["--poisson", str(poisson)] if poisson else []
    runs = simulate(parser().parse_args(given), Console(quiet=True))
    body = []
    for setting, run in zip(settings, runs, strict=True):
        metrics, server = run.metrics, run.server_metrics
        assert metrics is not None
        assert server is not None
        assert metrics.ttft_s is not None
        assert metrics.itl_s is not None
        cells = [show(metrics.output_tokens_per_s), format_seconds(metrics.ttft_s.p99)]
        cells += [format_seconds(metrics.itl_s.p99), f"{server.mean_batch:.1f}", str(server.preemptions)]
        body.append([f"`{setting}`", *cells])
    return _grid(["setting", "tokens/s", "TTFT p99", "ITL p99", "mean batch", "preemptions"], body)


# ---------------------------------------------------------------------- replicas


def replicas_setup(results: Path = RESULTS) -> str:
    """Return what was simulated as a sentence."""
    table = newest_table(REPLICAS, results)
    if table is None:
        return "Not there yet: `.venv/bin/python -m simulator.plan` makes it.\n"
    return ", ".join(f"{name} {value}" for name, value in table.setup.items()) + ".\n"


def replicas_figure() -> str:
    """Return the table of replicas as a figure, light and dark."""
    return figures(REPLICAS)


def replicas_table(results: Path = RESULTS) -> str:
    """Return the table of all numbers of replicas and policies."""
    table = newest_table(REPLICAS, results)
    if table is None:
        return ""
    kept = [place for place, name in enumerate(table.columns) if name != "requests"]
    return _grid(
        [table.columns[place] for place in kept], [[show(row[place]) for place in kept] for row in table.rows]
    )


def router_limits(results: Path = RESULTS) -> str:
    """Return for each policy whether one router keeps up with the largest number of replicas."""
    table = newest_table(REPLICAS, results)
    if table is None:
        return ""
    found = []
    sent = series(table, "requests/s sent")
    for policy, (replicas, decisions) in series(table, "decisions/s").items():
        needed = dict(zip(*sent[policy], strict=True))
        behind = [count for count, rate in zip(replicas, decisions, strict=True) if rate < needed[count]]
        verdict = f"falls behind at {min(behind):,.0f}" if behind else "keeps up"
        found.append(
            f"- *{policy.replace('_', ' ')}* {verdict}: among {max(replicas):,.0f} replicas it chooses "
            f"{decisions[-1]:,.0f} times a second, where {needed[max(replicas)]:,.0f} requests come.\n"
        )
    return "".join(found)
