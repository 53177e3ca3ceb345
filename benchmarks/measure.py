"""Sends one workload to a running server and fills in the result."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.calibrate import warmup_requests
from benchmarks.client import Endpoint
from benchmarks.environment import describe_environment
from benchmarks.loadgen import LoadGeneratorError, LoadPlan, LoadResult, Progress, run_load
from benchmarks.metrics import summarize, summarize_server
from benchmarks.results import DIGITS, Calibration, Lineup, Run, ServerInfo, Status, WorkloadInfo
from benchmarks.workloads import PromptWriter, Workload, build

BUSY_GENERATOR = 0.5  # of a core: above this, the generator itself may limit the results
LATE_S = 0.05  # a request that leaves later than this was held up by the generator


@dataclass(frozen=True, slots=True)
class Measurement:
    """Settings of a run that are the same for all servers of a comparison.

    Attributes:
        slo_ttft_s, slo_itl_s: objectives for the first token and for gaps between tokens, in seconds.
        stall_timeout_s: a run ends if no stream brings a token for this many seconds.
    """

    comparison: str
    seed: int = 0
    quick: bool = False
    text: bool = False
    slo_ttft_s: float = 2.0
    slo_itl_s: float = 0.2
    stall_timeout_s: float = 120.0
    run_timeout_s: float = 3600.0


def new_comparison_name() -> str:
    """Return a name for a comparison that begins now. Names sort by time."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")


def blank_run(
    workload: Workload,
    server: ServerInfo,
    calibration: Calibration,
    measurement: Measurement,
    *,
    lineup: Lineup,
    repeat: int = 1,
) -> Run:
    """Return the result of a run that has not been measured yet. Its status is `failed` until `measure` sets it."""
    return Run(
        comparison=measurement.comparison,
        repeat=repeat,
        lineup=lineup,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        status="failed",
        reason="not measured",
        workload=WorkloadInfo(
            name=workload.name,
            arrivals=workload.arrivals,
            rate=None if workload.rate is None else workload.rate * calibration.factor,
            seed=measurement.seed,
            quick=measurement.quick,
            text=measurement.text,
        ),
        server=server,
        calibration=calibration,
        environment=describe_environment(),
    )


def measure(
    run: Run,
    workload: Workload,
    endpoint: Endpoint,
    writer: PromptWriter,
    measurement: Measurement,
    on_progress: Progress = lambda *_: None,
) -> None:
    """Send a workload to a server and fill in a blank run.

    Errors of the server, and a failure of the generator, go to the run's status and reason.
    """
    assert run.calibration is not None
    plan = LoadPlan(
        endpoint=endpoint,
        requests=build(
            workload,
            writer,
            seed=measurement.seed,
            factor=run.calibration.factor,
            quick=measurement.quick,
            text=measurement.text,
        ),
        warmup=warmup_requests(writer),
        sequential=workload.arrivals == "sequential",
        stall_timeout_s=measurement.stall_timeout_s,
        run_timeout_s=measurement.run_timeout_s,
    )
    try:
        result = run_load(plan, on_progress)
    except LoadGeneratorError as error:
        run.reason = str(error)
        return
    fill_in(run, result, measurement, full_length=endpoint.ignore_eos)


def fill_in(run: Run, result: LoadResult, measurement: Measurement, *, full_length: bool) -> None:
    """Fill in a run's metrics, engine steps, status and notes from the load generator's result."""
    run.requests = result.requests
    run.generator = result.generator
    run.metrics = summarize(
        result.requests,
        slo_ttft_s=measurement.slo_ttft_s,
        slo_itl_s=measurement.slo_itl_s,
        full_length=full_length,
    )
    before, after = result.telemetry_before, result.telemetry_after
    if before is not None and after is not None:
        run.server_metrics = summarize_server(before["counters"], after["counters"], after["steps"])
        run.engine_steps = to_columns(after["steps"], origin_s=result.origin_s)
    run.status, run.reason = judge(run, result.abort)
    run.notes = list(doubts(run))


def judge(run: Run, abort: str | None) -> tuple[Status, str | None]:
    """Return a run's status, and the reason if it is not `ok`.

    Args:
        abort: why the load generator ended the run before its time; None: it did not.
    """
    metrics = run.metrics
    assert metrics is not None
    errors = [record.error for record in run.requests if record.error is not None]
    if metrics.completed == 0:
        return "failed", abort or f"no request completed; first error: {errors[0]}"
    if errors:
        return "incomplete", abort or f"{len(errors)} of {metrics.requests} requests failed: {errors[0]}"
    if metrics.short:
        return "incomplete", f"{metrics.short} answers are shorter than asked for"
    return "ok", None


def doubts(run: Run) -> list[str]:
    """Return notes on what may have distorted a run's numbers."""
    notes = []
    if run.generator is not None and run.generator.cpu_share > BUSY_GENERATOR:
        notes.append(f"the load generator used {run.generator.cpu_share:.0%} of a core")
    if run.generator is not None and run.generator.max_lag_s > LATE_S:
        notes.append(f"a request left {run.generator.max_lag_s * 1000:.0f} ms late")
    if run.server_metrics is not None and run.server_metrics.missing_steps > 0:
        notes.append(f"{run.server_metrics.missing_steps} engine steps had left the server's memory")
    return notes


def to_columns(steps: Sequence[dict[str, Any]], *, origin_s: float) -> dict[str, list[int | float]]:
    """Return step records as one list per field (a third of the size), with times on the run's clock.

    An engine on this machine reads the same monotonic clock as the load generator. The clock of another machine has
    another zero, so its steps and the requests cannot be drawn on one time axis.
    """
    columns: dict[str, list[int | float]] = {
        name: [step[name] for step in steps] for name in (steps[0] if steps else ())
    }
    if columns:
        columns["started_s"] = [round(value - origin_s, DIGITS) for value in columns["started_s"]]
        columns["duration_s"] = [round(value, DIGITS) for value in columns["duration_s"]]
    return columns
