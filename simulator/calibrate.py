"""`python -m simulator.calibrate`: prices from measured runs, and how well they predict those runs.

Every run is simulated from its clients' first request to their last answer, and compared with the measurement.
Two tables are left beside the runs: `simulator_costs` and `simulator_predictions`. Nothing is measured here: the
same runs give the same tables on any machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from rich.console import Console

from benchmarks.results import RESULTS
from simulator.predict import TOLERANCE, predictions, predictions_table
from simulator.prices import costs_table, fit_group, measured_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulator.calibrate", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder of runs ({RESULTS})")
    options = parser.parse_args(arguments)
    console = Console()
    groups = measured_runs(options.results)
    if not groups:
        Console(stderr=True).print(f"error: no runs of phases below {options.results}", style="red")
        return 2
    fits = [fit_group(group, measured) for group, measured in groups.items()]
    for fit in fits:
        console.print(
            f"{', '.join(astuple(fit.group))}: {fit.runs} runs, "
            f"{fit.same_share:.2%} of {fit.steps:,} steps planned alike",
            highlight=False,
        )
    found = predictions(groups)
    for name, figure in (("throughput", 0), ("TTFT p99", 1)):
        good = sum(abs(each.errors[figure]) <= TOLERANCE for each in found)
        console.print(f"{name} within {TOLERANCE:.0%} of what was measured: {good} of {len(found)}")
    for table in (costs_table(fits), predictions_table(found)):
        console.print(f"written: {table.save(options.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
