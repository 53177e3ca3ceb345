"""Prices of a pass on the measured machines, and the table that stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import Run
from benchmarks.tables import Cell, MeasuredTable, newest_table
from common.engine.config import EngineConfig
from simulator.cost import LinearCost
from simulator.replay import phase_of, schedule_options

COSTS = "simulator_costs"
PRICES = ("pass_base_s", "row_s", "column_s", "held_s", "token_s", "pair_s", "logit_s")
OTHERS = ("between_s", "between_row_s", "arrival_s", "delivery_s")

#: How steps follow each other. Each of these modes has its own cost on the host.
SYNCHRONOUS, ONE_BY_ONE, PIPELINED = "synchronous", "one by one", "pipelined"


@dataclass(frozen=True, slots=True)
class Group:
    """Identifies the runs that share prices, because their steps cost the same.

    Attributes:
        machine: the name of the processor or GPU.
        model: the name of the model.
        revision: the commit of the code that was measured.
        kernels: "native", "torch", or "triton".
        mode: how steps follow each other: `SYNCHRONOUS`, `ONE_BY_ONE` or `PIPELINED`.
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
            kernels=version.get("kernels", "torch"),  # older servers, which had torch only, did not report it
            mode=mode_of(run),
        )


def mode_of(run: Run) -> str:
    return mode_of_config(phase_of(run).Config(**schedule_options(run)))


def mode_of_config(config: EngineConfig) -> str:
    """Return `SYNCHRONOUS` for a phase without a pipeline, `ONE_BY_ONE` at depth 0, else `PIPELINED`."""
    depth = getattr(config, "pipeline_depth", None)
    return SYNCHRONOUS if depth is None else PIPELINED if depth else ONE_BY_ONE


@dataclass(frozen=True, slots=True)
class Fit:
    """Prices that were fitted to one group of runs (`simulator.fitting`).

    Attributes:
        newest: when the latest of the group's runs was started.
        steps: the number of measured steps.
        same_share: the share of steps in which the replayed engine planned the measured work.
        step_error: median relative error of a step's time, predicted with prices of the other workloads; None if
            there are no other workloads.
        total_error: like `step_error`, for the sum of the times of a run's steps.
    """

    group: Group
    cost: LinearCost
    newest: str
    runs: int
    steps: int
    same_share: float
    step_error: float | None
    total_error: float | None


# ---------------------------------------------------------------------- the table


GROUP = ("machine", "model", "revision", "kernels", "steps")
_FOUND = ("newest run", "runs", "steps measured", "planned alike", "error of a step", "error of a run")
_PER_SECOND = 1e6  # the table has prices in microseconds


def costs_table(fits: Sequence[Fit]) -> MeasuredTable:
    """Return the table that stores the fits."""
    rows: list[list[Cell]] = []
    for fit in fits:
        found = (fit.newest, fit.runs, fit.steps, fit.same_share, fit.step_error, fit.total_error)
        prices = (float(f"{getattr(fit.cost, name) * _PER_SECOND:.6g}") for name in (*PRICES, *OTHERS))
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


def load_fits(results: Path) -> list[Fit]:
    """Return the fits in the newest table below a folder of results, newest runs first; [] without a table."""
    table = newest_table(COSTS, results)
    fits = [_read_fit(row) for row in table.rows] if table is not None else []
    return sorted(fits, key=lambda fit: fit.newest, reverse=True)


def _read_fit(row: list[Any]) -> Fit:
    group, found = Group(*row[: len(GROUP)]), row[len(GROUP) : len(GROUP) + len(_FOUND)]
    prices = row[len(GROUP) + len(_FOUND) :]
    named = zip((*PRICES, *OTHERS), prices, strict=True)
    return Fit(group, LinearCost(**{name: price / _PER_SECOND for name, price in named}), *found)


def find_cost(fits: Sequence[Fit], model: str, mode: str, machine: str = "") -> Fit:
    """Return the newest prices for a model and a mode, of a machine whose name begins with `machine`.

    Args:
        fits: the known prices, newest first.

    Raises:
        ValueError: there are no such prices; the message lists the known ones.
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
