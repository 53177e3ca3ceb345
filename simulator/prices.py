"""The prices of a pass on the measured machines: fitted to runs, and kept in a table.

Runs of one machine, model and revision are replayed (`simulator.replay`), and a price is fitted to each kind of
work in a pass (`simulator.fitting`).

A price that was fitted to the run it is tried on flatters itself. So errors are those of prices *held out*: of each
workload, by what the other workloads alone say.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.files import load_comparisons
from benchmarks.results import Run
from benchmarks.tables import Cell, MeasuredTable, newest_table
from common.config import EngineConfig
from simulator.cost import LinearCost, Work
from simulator.fitting import Floats, fit_prices
from simulator.replay import Replay, phase_of, replay, schedule_options

QUANTITIES = ("passes", *Work._fields)
PRICES = ("pass_base_s", "row_s", "column_s", "held_s", "token_s", "pair_s", "logit_s")
COSTS = "simulator_costs"
OTHERS = ("between_s", "between_row_s", "arrival_s", "delivery_s")

#: How steps follow each other, for each has its own cost on the host. Steps in flight are read two steps later.
SYNCHRONOUS, ONE_BY_ONE, PIPELINED = "synchronous", "one by one", "pipelined"
LAG = 2

TYPICAL_ARRIVAL_S = 0.0025  # where no run has a request that came to an idle engine
ALONE_S = 0.1  # nobody else came within this time


@dataclass(frozen=True, slots=True)
class Group:
    """Runs whose steps cost the same.

    Attributes:
        machine: the name of the processor or GPU.
        model: its name.
        revision: of the code that was measured.
        kernels: "native", "torch", or "triton".
        mode: how steps follow each other.
    """

    machine: str
    model: str
    revision: str
    kernels: str
    mode: str

    @classmethod
    def of(cls, run: Run) -> Group:
        environment, version = run.environment, run.server.version or {}
        return cls(
            machine=environment["gpu"] or environment["cpu"],
            model=run.server.model,
            revision=environment["git"] or "",
            kernels=version.get("kernels", "torch"),  # servers that had no others did not say
            mode=mode_of(run),
        )


def mode_of(run: Run) -> str:
    return mode_of_config(phase_of(run).Config(**schedule_options(run)))


def mode_of_config(config: EngineConfig) -> str:
    """Return how the steps of a phase with these options follow each other."""
    depth = getattr(config, "pipeline_depth", None)
    return SYNCHRONOUS if depth is None else PIPELINED if depth else ONE_BY_ONE


@dataclass(frozen=True, slots=True)
class Fit:
    """A group's prices.

    Attributes:
        newest: when the latest of its runs was started.
        steps: how many there were.
        same_share: of them, those in which the engine planned what was measured.
        step_error: of a step's predicted time, the median, by prices of other workloads; None where there are none.
        total_error: of all steps of a run together, likewise.
    """

    group: Group
    cost: LinearCost
    newest: str
    runs: int
    steps: int
    same_share: float
    step_error: float | None
    total_error: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured run and its replay."""

    run: Run
    replay: Replay

    @property
    def times(self) -> tuple[Floats, Floats]:
        """The work of each step [steps, kinds], and its seconds: if steps overlap, up to the next one's start."""
        steps = self.replay.steps
        amounts: list[list[float]] = []
        seconds: list[float] = []
        if mode_of(self.run) == PIPELINED:
            for before, step, following, behind in zip(steps, steps[1:], steps[2:], steps[3:], strict=False):
                if before.works and step.works and following.works and step.goes_on and following.goes_on:
                    amounts.append(_amounts(before.works))
                    seconds.append(behind.started_s - following.started_s)
        else:
            for step in steps:
                if step.works and step.is_same:
                    amounts.append(_amounts(step.works))
                    seconds.append(step.duration_s)
        return np.array(amounts, dtype=float).reshape(-1, len(QUANTITIES)), np.array(seconds)

    @property
    def pauses(self) -> tuple[Floats, Floats]:
        """Return each step's delivered tokens beside a column of ones [steps, 2], and the pause until the next."""
        pairs = zip(self.replay.steps, self.replay.steps[1:], strict=False)
        found = [(s.tokens, n.started_s - s.started_s - s.duration_s) for s, n in pairs if s.goes_on]
        if mode_of(self.run) == PIPELINED:
            found = []  # part of a step's time
        tokens = np.array([[1.0, each] for each, _ in found]).reshape(-1, 2)
        return tokens, np.array([max(0.0, pause) for _, pause in found])


def _amounts(works: Iterable[Work]) -> list[float]:
    total = [0.0] * len(QUANTITIES)
    for work in works:
        for kind, amount in enumerate((1, *work)):
            total[kind] += amount
    return total


# ---------------------------------------------------------------------- prices


def cost_of(measured: Sequence[Measured]) -> LinearCost:
    """Fit prices to the runs of one group.

    Kinds of work that always come together cannot be told apart and share a price: columns attended to and columns
    held if no blocks are shared; rows and passes if all passes have equally many rows.

    Raises:
        ValueError: none of them has a step that could be used.
    """
    amounts, seconds = _together([each.times for each in measured])
    prices = fit_prices(amounts, seconds)
    tokens, pauses = _together([each.pauses for each in measured])
    between, between_row = fit_prices(tokens, pauses) if len(pauses) else (0.0, 0.0)
    deliveries = [each for one in measured for each in one.replay.deliveries_s]
    arrivals = [each for one in measured for each in lone_arrivals(one)]
    return LinearCost(
        **dict(zip(PRICES, map(float, prices), strict=True)),
        between_s=float(between),
        between_row_s=float(between_row),
        arrival_s=max(0.0, statistics.median(arrivals)) if arrivals else TYPICAL_ARRIVAL_S,
        delivery_s=max(0.0, statistics.median(deliveries)) if deliveries else 0.0,
    )


def _together(found: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    return np.concatenate([each for each, _ in found]), np.concatenate([each for _, each in found])


def lone_arrivals(measured: Measured) -> list[float]:
    """Return how long requests that came alone took to reach an idle engine. Phase 4 waits for more requests."""
    run = measured.run
    sent = sorted(record.sent_s for record in run.requests if record.sent_s is not None)
    is_crowded = any(later - earlier < ALONE_S for earlier, later in itertools.pairwise(sent))
    return [] if is_crowded or phase_of(run).PHASE.number == 4 else measured.replay.arrivals_s


def fit_group(group: Group, measured: Sequence[Measured]) -> Fit:
    """Return a group's prices, and their errors on each workload when they are fitted to the others."""
    cost = cost_of(measured)
    step_errors: list[float] = []
    total_errors: list[float] = []
    for workload, others in held_out(measured).items():
        if others is None:
            continue
        for each in measured:
            if each.run.workload.name == workload:
                amounts, seconds = each.times
                expected = amounts @ np.array([getattr(others, name) for name in PRICES])
                step_errors += list(np.abs(expected / seconds - 1))
                total_errors.append(abs(float(expected.sum() / seconds.sum()) - 1))
    steps = [step for each in measured for step in each.replay.steps]
    return Fit(
        group=group,
        cost=cost,
        newest=max(each.run.started_at for each in measured),
        runs=len(measured),
        steps=len(steps),
        same_share=sum(step.is_same for step in steps) / len(steps),
        step_error=statistics.median(step_errors) if step_errors else None,
        total_error=statistics.median(total_errors) if total_errors else None,
    )


def held_out(measured: Sequence[Measured]) -> Mapping[str, LinearCost | None]:
    """Return for each workload the prices fitted to the other workloads; None if there is no other."""
    found: dict[str, LinearCost | None] = {}
    for workload in sorted({each.run.workload.name for each in measured}):
        others = [each for each in measured if each.run.workload.name != workload]
        found[workload] = cost_of(others) if others else None
    return found


# ---------------------------------------------------------------------- from and to files


def measured_runs(results: Path) -> dict[Group, list[Measured]]:
    """Replay all complete runs of phases below a folder. Returns them by group."""
    runs = [run for each in load_comparisons(results) for run in each.runs]
    usable = [
        run for run in runs if run.status == "ok" and run.engine_steps and run.server.options is not None
    ]
    found: dict[Group, list[Measured]] = defaultdict(list)
    for run in track(usable, "replaying", transient=True):
        found[Group.of(run)].append(Measured(run, replay(run)))
    return dict(found)


GROUP = ("machine", "model", "revision", "kernels", "steps")
_FOUND = ("newest run", "runs", "steps measured", "planned alike", "error of a step", "error of a run")
_PER_SECOND = 1e6  # prices are kept in microseconds


def costs_table(fits: Sequence[Fit]) -> MeasuredTable:
    """Return the table of fits, as it is kept in a file."""
    rows: list[list[Cell]] = []
    for fit in fits:
        found = (fit.newest, fit.runs, fit.steps, fit.same_share, fit.step_error, fit.total_error)
        prices = (_rounded(getattr(fit.cost, name) * _PER_SECOND) for name in (*PRICES, *OTHERS))
        rows.append([*astuple(fit.group), *found, *prices])
    return MeasuredTable(
        name=COSTS,
        title="what a pass costs, from measured steps",
        setup={
            "errors": "by prices of other workloads, median",
            "computed from": "the runs of other files, where this was run",
        },
        columns=[*GROUP, *_FOUND, *(f"{name.removesuffix('_s')}, µs" for name in (*PRICES, *OTHERS))],
        rows=rows,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def load_fits(results: Path) -> list[Fit]:
    """Return the fits in the newest table below a folder of results, newest runs first; none without a table."""
    table = newest_table(COSTS, results)
    fits = [_read_fit(row) for row in table.rows] if table is not None else []
    return sorted(fits, key=lambda fit: fit.newest, reverse=True)


def _read_fit(row: list[Any]) -> Fit:
    group, found = Group(*row[: len(GROUP)]), row[len(GROUP) : len(GROUP) + len(_FOUND)]
    prices = row[len(GROUP) + len(_FOUND) :]
    named = zip((*PRICES, *OTHERS), prices, strict=True)
    return Fit(group, LinearCost(**{name: price / _PER_SECOND for name, price in named}), *found)


def find_cost(fits: Sequence[Fit], model: str, mode: str, machine: str) -> Fit:
    """Return the newest prices for a model and a mode, of a machine whose name begins with `machine`.

    Raises:
        ValueError: there are none.
    """
    for fit in fits:
        if (fit.group.model, fit.group.mode) == (model, mode) and fit.group.machine.startswith(machine):
            return fit
    known = sorted({f"{fit.group.model} on {fit.group.machine}, {fit.group.mode}" for fit in fits})
    raise ValueError(
        f"nothing was measured of {model}{f' on {machine}' if machine else ''} with steps {mode}: measure it "
        "(`python -m benchmarks compare`) and fit prices (`python -m simulator.calibrate`), or describe a GPU "
        f"with --gpu. There are {'; '.join(known) or 'none at all'}"
    )
