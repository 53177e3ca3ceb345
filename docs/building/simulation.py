"""Tables of the simulator's page: predictions beside measurements, and simulations of other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.files import Together
from benchmarks.tables import newest_table
from docs.building.markdown import table
from docs.building.results import RESULTS, SWEEP_LINES, turned_table
from simulator.__main__ import parser, simulate
from simulator.predict import PREDICTIONS, TOLERANCE
from simulator.prices import COSTS, load_fits

Row = dict[str, Any]

THROUGHPUT, TTFT = "output tokens/s", "TTFT p99, s"
NOTHING = "Not there yet: `.venv/bin/python -m simulator.calibrate` makes it.\n"


def _rows(name: str, results: Path) -> list[Row]:
    found = newest_table(name, results)
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows] if found is not None else []


# ---------------------------------------------------------------------- predicted and measured


def replayed_steps(results: Path = RESULTS) -> str:
    """Return the number of replayed steps whose simulated plan was the measured plan, as `x of y`."""
    rows = _rows(COSTS, results)
    steps = sum(row["steps measured"] for row in rows)
    alike = sum(round(row["steps measured"] * row["planned alike"]) for row in rows)
    return f"{alike:,} of {steps:,}" if steps else "none yet"


def _off(row: Row, figure: str, kind: str = "predicted") -> float | None:
    predicted = row[f"{figure}, {kind}"]
    return None if predicted is None else predicted / row[f"{figure}, measured"] - 1


def prediction_counts(results: Path = RESULTS) -> str:
    """Return a table of how many predictions are within `TOLERANCE` (a relative error) of the measured value."""
    rows = _rows(PREDICTIONS, results)
    if not rows:
        return NOTHING

    def within(figure: str, kind: str) -> str:
        errors = [off for row in rows if (off := _off(row, figure, kind)) is not None]
        good = sum(abs(error) <= TOLERANCE for error in errors)
        return f"{good} of {len(errors)}"

    held_out = "predicted, held out"
    return table(
        [f"within {TOLERANCE:.0%} of what was measured", "throughput", "TTFT p99"],
        [
            ["by prices of all workloads", within(THROUGHPUT, "predicted"), within(TTFT, "predicted")],
            ["by prices of the other workloads", within(THROUGHPUT, held_out), within(TTFT, held_out)],
        ],
    )


# ---------------------------------------------------------------------- other settings


def what_if_table(workload: str, requests: int, *settings: str, phase: str = "7", poisson: float = 0) -> str:
    """Simulate a workload on a phase with several settings. Returns a table with a row for each setting.

    Args:
        settings: options as the command line has them, with commas between several options of one setting.
        poisson: requests a second at random times; 0: the workload's own arrivals.
    """
    if not load_fits(RESULTS):
        return NOTHING
    given = ["--workload", workload, "--requests", str(requests)]
    given += [f"--variant={phase}:{setting}" for setting in settings]
    given += ["--poisson", str(poisson)] if poisson else []
    runs = simulate(parser().parse_args(given), Console(quiet=True))
    return turned_table(Together("", runs), SWEEP_LINES)
