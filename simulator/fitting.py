"""Fits prices to replayed runs: `time = a × passes + b × columns + … `, with no price below zero.

Prices predict the runs that they were fitted to better than other runs. So errors are measured *held out*: each
workload is predicted with prices that were fitted to the other workloads.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.progress import track
from scipy.optimize import nnls

from benchmarks.files import load_comparisons
from simulator.cost import LinearCost, Work
from simulator.prices import PIPELINED, PRICES, Fit, Group, mode_of
from simulator.replay import Replay, phase_of, replay

Floats = npt.NDArray[np.float64]

ROUNDS = 8  # of reweighting; prices converge after about five
SHORTEST_S = 1e-5  # lower bound of a step's expected time when its weight is computed
RIDGE = 1e-4  # ridge penalty: kinds of work that always come together share one price

KINDS = 1 + len(Work._fields)  # kinds of work: passes, and the fields of `Work`; `PRICES` has the same order
TYPICAL_ARRIVAL_S = 0.0025  # `Cost.arrival_s`, if no run has a request that came to an idle engine
ALONE_S = 0.1  # a request came alone if no other was sent within this time


def fit_prices(amounts: Floats, seconds: Floats) -> Floats:
    """Fit a price in seconds, not below zero, for each kind of work, so that the prices explain the steps' times.

    Steps differ a thousandfold in length, and the errors of long steps are larger. So a step's error is weighted
    like that of a count: by the inverse of the expected value (Poisson regression with an identity link). With
    these weights, the sum of the predicted times is nearly the sum of the measured times, however wrong
    single predictions are.

    Args:
        amounts: [steps, kinds] how much of each kind of work a step has.
        seconds: [steps] how long each step took.

    Returns:
        [kinds] the prices; 0 for a kind of work that no step has.

    Raises:
        ValueError: there are no steps.
    """
    if not len(seconds):
        raise ValueError("there are no steps to fit prices to")
    kinds = amounts.shape[1]
    prices = np.zeros(kinds)
    expected = np.full(len(seconds), seconds.mean())
    for _ in range(ROUNDS):
        weights = 1 / np.sqrt(np.maximum(expected, SHORTEST_S))
        weighted = amounts * weights[:, None]
        scale = np.linalg.norm(weighted, axis=0)
        scale[scale == 0] = 1
        rows = np.vstack([weighted / scale, RIDGE * np.eye(kinds)])
        prices = nnls(rows, np.append(seconds * weights, np.zeros(kinds)))[0] / scale
        expected = amounts @ prices
    return prices


# ---------------------------------------------------------------------- the measurements in a run


def step_times(run: Replay) -> tuple[Floats, Floats]:
    """Return the work of each usable step [steps, kinds], and its seconds [steps].

    Without a pipeline, a step's seconds are its own duration. In a pipeline, steps overlap: the time from the start
    of step n + 2 to the start of step n + 3 belongs to step n.

    Steps without a pass are left out. So are, without a pipeline, steps that the replayed engine planned otherwise,
    and in a pipeline, steps behind which the next steps do not follow at once.
    """
    steps = run.steps
    if mode_of(run.run) == PIPELINED:
        rows = [
            (before, behind.started_s - following.started_s)
            for before, step, following, behind in zip(steps, steps[1:], steps[2:], steps[3:], strict=False)
            if before.works and step.works and following.works and step.goes_on and following.goes_on
        ]
    else:
        rows = [(step, step.duration_s) for step in steps if step.works and step.is_same]
    amounts = [[len(step.works), *map(sum, zip(*step.works, strict=True))] for step, _ in rows]
    return np.array(amounts, dtype=float).reshape(-1, KINDS), np.array([seconds for _, seconds in rows])


def pauses(run: Replay) -> tuple[Floats, Floats]:
    """Return the pauses after steps that another step follows at once, for `fit_prices`.

    In a pipeline steps overlap, so there are no pauses: the host's time between steps is part of a step.

    Returns:
        [steps, 2]: 1, and the number of tokens that the step delivered.
        [steps]: seconds from the end of the step to the beginning of the next step.
    """
    pairs = [] if mode_of(run.run) == PIPELINED else itertools.pairwise(run.steps)
    found = [(s.tokens, n.started_s - s.started_s - s.duration_s) for s, n in pairs if s.goes_on]
    tokens = np.array([[1.0, tokens] for tokens, _ in found]).reshape(-1, 2)
    return tokens, np.array([max(0.0, pause) for _, pause in found])


def lone_arrivals(run: Replay) -> list[float]:
    """Return for each request that found the engine idle the seconds from its sending to the step that queued it.

    Returns [] if any two requests of the run were sent within `ALONE_S`, and for phase 4, which waits for more
    requests before it starts a batch.
    """
    sent = sorted(record.sent_s for record in run.run.requests if record.sent_s is not None)
    is_crowded = any(later - earlier < ALONE_S for earlier, later in itertools.pairwise(sent))
    return [] if is_crowded or phase_of(run.run).PHASE.number == 4 else run.arrivals_s


# ---------------------------------------------------------------------- prices of a group


def replayed_runs(results: Path) -> dict[Group, list[Replay]]:
    """Replay the complete runs of phases below a folder, if they have engine steps. Returns the replays by group.

    Runs with guesses are left out: which guesses are right depends on the text, and a replay has no text.
    """
    usable = [
        run
        for each in load_comparisons(results)
        for run in each.runs
        if run.status == "ok" and run.engine_steps and run.server.options is not None
        if not any(run.engine_steps.get("drafts", ()))
    ]
    found: dict[Group, list[Replay]] = defaultdict(list)
    for run in track(usable, "replaying", transient=True):
        found[Group.of(run)].append(replay(run))
    return dict(found)


def cost_of(runs: Sequence[Replay]) -> LinearCost:
    """Fit prices to the runs of one group.

    Kinds of work that always come together cannot be told apart, so they share a price. If no blocks are shared,
    these are `Work.columns` and `Work.held`. If all passes have equally many rows, these are rows and passes.

    Raises:
        ValueError: no run has a step that could be used.
    """
    prices = fit_prices(*_together(map(step_times, runs)))
    tokens, pause_s = _together(map(pauses, runs))
    between, between_row = fit_prices(tokens, pause_s) if len(pause_s) else (0.0, 0.0)
    deliveries = [each for run in runs for each in run.deliveries_s]
    arrivals = [each for run in runs for each in lone_arrivals(run)]
    return LinearCost(
        **dict(zip(PRICES, map(float, prices), strict=True)),
        between_s=float(between),
        between_row_s=float(between_row),
        arrival_s=max(0.0, statistics.median(arrivals)) if arrivals else TYPICAL_ARRIVAL_S,
        delivery_s=max(0.0, statistics.median(deliveries)) if deliveries else 0.0,
    )


def _together(found: Iterable[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    amounts, seconds = zip(*found, strict=True)
    return np.concatenate(amounts), np.concatenate(seconds)


def held_out(runs: Sequence[Replay]) -> dict[str, LinearCost]:
    """Return for each workload the prices fitted to the other workloads; empty if there is only one workload."""
    workloads = sorted({each.run.workload.name for each in runs})
    if len(workloads) == 1:
        return {}
    return {name: cost_of([each for each in runs if each.run.workload.name != name]) for name in workloads}


def fit_group(group: Group, runs: Sequence[Replay], others: Mapping[str, LinearCost]) -> Fit:
    """Fit prices to a group's runs, and compute the errors of predicted times.

    Args:
        others: for each workload the prices that were fitted to the other workloads. They predict the times of the
            workload's runs for the errors.
    """
    step_errors: list[float] = []
    total_errors: list[float] = []
    for each in runs:
        if (cost := others.get(each.run.workload.name)) is not None:
            amounts, seconds = step_times(each)
            expected = amounts @ np.array([getattr(cost, name) for name in PRICES])
            step_errors += list(np.abs(expected / seconds - 1))
            total_errors.append(abs(float(expected.sum() / seconds.sum()) - 1))
    steps = [step for each in runs for step in each.steps]
    return Fit(
        group=group,
        cost=cost_of(runs),
        newest=max(each.run.started_at for each in runs),
        runs=len(runs),
        steps=len(steps),
        same_share=sum(step.is_same for step in steps) / len(steps),
        step_error=statistics.median(step_errors) if step_errors else None,
        total_error=statistics.median(total_errors) if total_errors else None,
    )
