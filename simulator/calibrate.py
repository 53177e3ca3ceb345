"""`python -m simulator.calibrate`: fits prices of a pass to measured runs, and predicts those runs with the prices.

Every run is simulated from its clients' first request to their last answer, and compared with the measurement.
Two tables are written beside the runs: `simulator_costs` and `simulator_predictions`. Nothing is measured here: the
same runs give the same tables on any machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.results import RESULTS
from simulator.predict import TOLERANCE, Prediction, predictions, predictions_table
from simulator.prices import Fit, costs_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulator.calibrate", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder of runs ({RESULTS})")
    options = parser.parse_args(arguments)
    try:
        calibrate(options.results, Console())
    except ValueError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    return 0


def calibrate(results: Path, console: Console) -> None:
    """Fit the cost model to the measured runs below a folder, and predict these runs with it.

    Saves the tables `simulator_costs` and `simulator_predictions` in the folder.

    Raises:
        ValueError: SciPy is not installed, or there are no runs.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ValueError(
            "prices are fitted with SciPy, which is not installed: .venv/bin/pip install -e '.[simulator]'"
        )
    from simulator.fitting import fit_group, held_out, replayed_runs  # only this needs SciPy

    groups = replayed_runs(results)
    if not groups:
        raise ValueError(f"no runs of phases below {results}")
    fits: list[Fit] = []
    found: list[Prediction] = []
    for group, runs in track(groups.items(), "simulating", transient=True):
        others = held_out(runs)
        fit = fit_group(group, runs, others)
        fits.append(fit)
        found += predictions(group, runs, fit.cost, others)
        console.print(
            f"{', '.join(astuple(group))}: {fit.runs} runs, "
            f"{fit.same_share:.2%} of {fit.steps:,} steps planned alike",
            highlight=False,
        )
    for name, figure in (("throughput", 0), ("TTFT p99", 1)):
        good = sum(abs(each.errors[figure]) <= TOLERANCE for each in found)
        console.print(f"{name} within {TOLERANCE:.0%} of what was measured: {good} of {len(found)}")
    for table in (costs_table(fits), predictions_table(found)):
        console.print(f"written: {table.save(results)}")


if __name__ == "__main__":
    sys.exit(main())
