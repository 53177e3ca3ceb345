"""Simulates measured runs, and compares the predicted metrics with the measured metrics."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.metrics import summarize
from benchmarks.results import Metrics, Run
from benchmarks.tables import Cell, MeasuredTable
from simulator.arrivals import Arrival, arrivals_of
from simulator.cost import Cost, LinearCost
from simulator.engine import simulate_engine
from simulator.loop import run as simulate
from simulator.observers import Timelines
from simulator.prices import GROUP, Group
from simulator.replay import Replay, order_of_arrival, phase_of, plan_of, schedule_options

PREDICTIONS = "simulator_predictions"
TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Prediction:
    """Measured and predicted speed of one workload on one server. Each pair has output tokens a second and TTFT p99
    in seconds, as medians of runs.

    Attributes:
        group: the group whose prices were used.
        measured: as measured.
        predicted: as simulated with the prices of the group.
        held_out: as simulated with prices of the other workloads; None if there are no other workloads.
    """

    group: Group
    workload: str
    server: str
    repeats: int
    measured: tuple[float, float]
    predicted: tuple[float, float]
    held_out: tuple[float, float] | None

    @property
    def errors(self) -> tuple[float, float]:
        """Return the relative errors of the predicted output tokens a second and TTFT p99; 0.1: 10 % too much."""
        (tokens, ttft), (measured_tokens, measured_ttft) = self.predicted, self.measured
        return tokens / measured_tokens - 1, ttft / measured_ttft - 1


def arrivals_in(run: Run) -> Iterator[Arrival]:
    """Yield the planned arrivals of a measured run. Requests that were sent at once keep the order in which the
    measured engine got them."""
    sequential = run.workload.arrivals == "sequential"
    planned = {each.index: each for each in arrivals_of(plan_of(run), sequential=sequential)}
    first = [record.index for record in order_of_arrival(run) if planned[record.index].after is None]
    yield from (planned[index] for index in first)
    yield from (each for each in planned.values() if each.after is not None)


def simulate_run(run: Run, cost: Cost) -> Metrics:
    """Simulate a measured run, and return the metrics that the load generator would have measured."""
    engine = simulate_engine(phase_of(run), cost, **schedule_options(run))
    seen = Timelines()
    simulate(engine, arrivals_in(run), seen)
    assert run.metrics is not None
    return summarize(
        [record.rounded() for record in seen.requests],
        slo_ttft_s=run.metrics.slo_ttft_s,
        slo_itl_s=run.metrics.slo_itl_s,
    )


def figures(metrics: Metrics | None) -> tuple[float, float]:
    """Return output tokens a second, and TTFT p99 in seconds."""
    assert metrics is not None
    assert metrics.ttft_s is not None
    return metrics.output_tokens_per_s, metrics.ttft_s.p99


def predictions(
    group: Group, replays: Sequence[Replay], cost: LinearCost, others: Mapping[str, LinearCost]
) -> Iterator[Prediction]:
    """Simulate the runs of a group, and yield a prediction for each workload and server of a comparison.

    Args:
        replays: the replays of the group's runs.
        cost: the group's prices.
        others: for each workload, the prices that were fitted to the other workloads.
    """
    columns: dict[tuple[str, str, str], list[Replay]] = defaultdict(list)
    for each in replays:
        columns[each.run.workload.name, each.run.server.label, each.run.comparison].append(each)
    for (workload, server, _), repeats in columns.items():
        runs = [each.run for each in repeats]
        without = others.get(workload)
        yield Prediction(
            group,
            workload,
            server,
            len(runs),
            measured=_medians([figures(run.metrics) for run in runs]),
            predicted=_medians([figures(simulate_run(run, cost)) for run in runs]),
            held_out=_medians([figures(simulate_run(run, without)) for run in runs]) if without else None,
        )


def _medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second)


def predictions_table(found: Sequence[Prediction]) -> MeasuredTable:
    rows: list[list[Cell]] = []
    for each in found:
        row: list[Cell] = [*dataclasses.astuple(each.group), each.workload, each.server, each.repeats]
        for figure in (0, 1):
            held_out = each.held_out[figure] if each.held_out is not None else None
            row += [each.measured[figure], each.predicted[figure], held_out]
        rows.append(row)
    of_figure = ("measured", "predicted", "predicted, held out")
    return MeasuredTable(
        name=PREDICTIONS,
        title="what clients saw, measured and simulated",
        setup={"prices": "of simulator_costs; held out: without the workload's own runs"},
        columns=[
            *GROUP,
            "workload",
            "server",
            "repeats",
            *(f"output tokens/s, {each}" for each in of_figure),
            *(f"TTFT p99, s, {each}" for each in of_figure),
        ],
        rows=rows,
    )
