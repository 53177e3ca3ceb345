"""Compares servers: each in turn gets the same requests on the same machine, with the same KV memory.

```text
calibrate on the first server ──> factor for the arrival rates, the same for all
repeat 1   phase 4   phase 5   phase 6
repeat 2   phase 6   phase 5   phase 4      turned round, so that a machine that slowly
repeat 3   phase 4   phase 5   phase 6      grows warm or busy favours no phase
```

Every run has a fresh server, so its cache is empty and its memory is not fragmented. (A peer that is named by its
URL is neither started nor stopped.) One server is measured at a time, and no other server starts meanwhile. The
load of other programs is measured before the first run and after each run, while no server computes. Runs beside
busy programs get a note.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.calibrate import CalibrationError, calibrate, fixed_factor
from benchmarks.client import Endpoint
from benchmarks.environment import cores_taken, is_busy, taken_in_words
from benchmarks.measure import Measurement, blank_run, measure
from benchmarks.report import FIRST_PEER, summary
from benchmarks.results import Calibration, Lineup, Run, ServerInfo
from benchmarks.servers import RunningServer, Target, open_server
from benchmarks.workloads import PromptWriter, Workload
from common.errors import StartupError

LOG_LINES_KEPT = 20


@dataclass(frozen=True, slots=True)
class Comparison:
    """The servers and workloads of a comparison, and how they are measured.

    Attributes:
        model: the model's name, as results show it.
        rate: the value of `--rate`: `auto`, `table`, or a factor for arrival rates (see `benchmarks.calibrate`).
        load: offered load for `auto`; None: the workload's own.
        batch: number of requests in a calibration's batch, if the server has no `max-batch-size` option.
        out: folder for results; None: no results are written.
        ignore_eos: whether requests ask for full-length answers. Requests of chats never do.
        trace: whether a trace of each run is kept beside its result. Without `out`, no trace is kept.
        show: returns the table that is printed when all runs of a workload are done.
        started_together: how many servers are started at once, before the first of them is measured. The others
            are idle meanwhile. More than one saves time on a machine with several cores, and takes their memory.
    """

    targets: Sequence[Target]
    workloads: Sequence[Workload]
    model: str
    writer: PromptWriter
    measurement: Measurement
    repeats: int = 1
    rate: str = "auto"
    load: float | None = None
    batch: int = 8
    out: Path | None = None
    ignore_eos: bool = True
    api_key: str | None = None
    trace: bool = False
    show: Callable[[Sequence[Run]], RenderableType] = summary
    started_together: int = 1

    @property
    def lineup(self) -> Lineup:
        return Lineup(servers=[target.label for target in self.targets], repeats=self.repeats)


def compare(comparison: Comparison, console: Console) -> list[Run]:
    """Run a comparison, print its tables and the folder of its results (if there is one), and return its runs.

    Raises:
        StartupError: arrival rates must be calibrated, and the first server does not start.
        CalibrationError: the calibration on the first server has failed.
        ValueError: `rate` is neither `auto` nor `table` nor a positive number.
    """
    runs: list[Run] = []
    total = len(comparison.workloads) * comparison.repeats * len(comparison.targets)
    try:
        _run_all(comparison, console, runs, total)
    finally:  # also if the user stops the comparison half-way
        if comparison.out is not None and runs:
            said = f"{len(runs)} runs written to {comparison.out}"
            if len(runs) < total:
                said = f"{len(runs)} of {total} runs written to {comparison.out}; figures and pages leave them out"
            console.print(said, soft_wrap=True, highlight=False)
    return runs


def _run_all(comparison: Comparison, console: Console, runs: list[Run], total: int) -> None:
    """Make every run of a comparison. When a run ends, it is added to `runs` and, if results are kept, written."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        taken = cores_taken()
        if is_busy(taken):
            said = f"{taken_in_words(taken)} just now: close them, or mistrust the times"
            progress.console.print(f"[yellow]{said}[/yellow]")
        calibrations = _calibrations(comparison, progress)
        overall = progress.add_task("runs", total=total, detail="")
        for workload in comparison.workloads:
            before = len(runs)
            for repeat in range(1, comparison.repeats + 1):
                turn = comparison.targets if repeat % 2 else comparison.targets[::-1]
                calibration = calibrations[workload.name]
                for run in _runs_in_turn(comparison, workload, turn, calibration, repeat, progress):
                    before_run, taken = taken, cores_taken()
                    if is_busy(most := max(before_run, taken)):
                        run.notes.append(f"{taken_in_words(most)} before or after run {repeat}")
                    if comparison.out is not None:
                        run.save(comparison.out)
                    runs.append(run)
                    progress.advance(overall)
                    if not console.is_terminal:  # which shows no bar
                        console.print(
                            f"{workload.name} on {run.server.label}: {len(runs)} of {total} runs done"
                        )
            console.print(comparison.show(runs[before:]))


def _runs_in_turn(
    comparison: Comparison,
    workload: Workload,
    targets: Sequence[Target],
    calibration: Calibration,
    repeat: int,
    progress: Progress,
) -> Iterator[Run]:
    """Measure the targets one after the other, and yield each run when its server has stopped."""
    most = comparison.started_together
    for group in (targets[start : start + most] for start in range(0, len(targets), most)):
        prepared = [prepare(comparison, workload, target, calibration, repeat) for target in group]
        with contextlib.ExitStack() as launched:
            if most > 1:
                names = " and ".join(server.target.label for _, server in prepared)
                task = progress.add_task(names, total=None, detail="starting")
                if not progress.console.is_terminal:  # which shows no bar
                    progress.console.print(f"starting {names}")
                for _, server in prepared:
                    server.launch()
                    # For a user who stops the comparison. Otherwise the server has stopped before.
                    launched.callback(server.stop)
                for _, server in prepared:
                    with contextlib.suppress(StartupError):  # `run_once` waits again, and tells the error
                        server.wait_until_ready()
                progress.remove_task(task)
            for run, server in prepared:
                yield run_once(comparison, workload, run, server, progress)


def prepare(
    comparison: Comparison, workload: Workload, target: Target, calibration: Calibration, repeat: int
) -> tuple[Run, RunningServer]:
    """Return a blank run of a workload on a target, and the target's server, which is not started yet."""
    info = ServerInfo(
        label=target.label,
        order=target.order,
        model=comparison.model,
        options=None if target.url else dict(target.options),
        variant=dict(target.variant),
    )
    run = blank_run(
        workload, info, calibration, comparison.measurement, lineup=comparison.lineup, repeat=repeat
    )
    if comparison.trace and comparison.out is not None and target.order < FIRST_PEER:
        comparison.out.mkdir(parents=True, exist_ok=True)
        path = (comparison.out / run.file_name).with_suffix(".trace")
        target = replace(target, options=target.options | {"trace": str(path)})
    return run, open_server(target)


def run_once(
    comparison: Comparison, workload: Workload, run: Run, server: RunningServer, progress: Progress
) -> Run:
    """Start a server (unless it is launched), measure one workload, stop the server.

    Returns the given run, which is filled in. Failures are noted in it.
    """
    info, label = run.server, run.server.label
    count = workload.count(quick=comparison.measurement.quick)
    task = progress.add_task(f"{workload.name} on {label}", total=count, detail="starting")

    def on_progress(finished: int, failed: int, total: int) -> None:
        detail = f"[red]{failed} failed[/red]" if failed else ""
        progress.update(task, completed=finished, total=total, detail=detail)

    try:
        with server:
            info.version = server.version
            progress.update(task, detail="")
            endpoint = _endpoint(comparison, server, workload)
            measure(run, workload, endpoint, comparison.writer, comparison.measurement, on_progress)
            died = server.exit_code  # None: the server was still running at the run's end
        info.exit_code = server.exit_code
        _note_the_end(run, died)
        if comparison.trace:
            path = server.target.options.get("trace")
            recorded = f"recorded meanwhile: {Path(path).name}" if path else ""
            run.notes.append(recorded or "no trace: only a phase that is started here records one")
    except StartupError as error:
        run.reason = str(error)
    finally:
        progress.remove_task(task)
    if run.status != "ok":
        info.log = list(server.log)[-LOG_LINES_KEPT:]
        progress.console.print(
            f"[red]{escape(label)}, {workload.name}: {run.status}[/red]: {escape(run.reason or '')}"
        )
        progress.console.print("\n".join(first_error(info.log)), markup=False, highlight=False)
    return run


def first_error(log: Sequence[str]) -> Sequence[str]:
    """Return the first line of a server's log that reports an error, and the two lines after it; [] without one."""
    at = next((i for i, line in enumerate(log) if " ERROR " in line), len(log))
    return log[at : at + 3]


def _note_the_end(run: Run, died: int | None) -> None:
    """Note in the run how its server ended.

    Args:
        died: the exit code if the server died during the run. Then the run has failed, even if all requests were
            done. None: the server ran until it was stopped.
    """
    exit_code = run.server.exit_code
    if died is not None:
        run.status = "failed"
        run.reason = (
            f"the server ended during the run (exit {died}); {run.reason or 'all requests were done'}"
        )
    elif exit_code not in (None, 0):
        run.notes.append(f"the server ended with exit code {exit_code} when it was asked to stop")


def _endpoint(comparison: Comparison, server: RunningServer, workload: Workload | None = None) -> Endpoint:
    """Return a server's endpoint. Its requests ask for answers of full length, unless the workload has chats or
    `comparison.ignore_eos` is False."""
    chats = workload is not None and workload.chats is not None
    full = comparison.ignore_eos and not chats
    return replace(server.endpoint, ignore_eos=full, api_key=comparison.api_key)


def _calibrations(comparison: Comparison, progress: Progress) -> Mapping[str, Calibration]:
    """Return each workload's calibration, by the workload's name.

    If `--rate` is `auto` and any workload has a rate, the first target's server is started to measure its capacity.
    """
    if comparison.rate != "auto":
        return {workload.name: fixed_factor(workload, comparison.rate) for workload in comparison.workloads}
    if not any(workload.rate is not None for workload in comparison.workloads):
        return {workload.name: Calibration(mode="auto", factor=1.0) for workload in comparison.workloads}
    first = comparison.targets[0]
    task = progress.add_task(f"calibrating on {first.label}", total=len(comparison.workloads), detail="")
    found = {}
    with open_server(first) as server:
        for workload in comparison.workloads:
            try:
                found[workload.name] = calibrate(
                    workload,
                    _endpoint(comparison, server),
                    comparison.writer,
                    batch=int(first.options.get("max-batch-size", comparison.batch)),
                    measured_on=first.label,
                    load=comparison.load,
                    stall_timeout_s=comparison.measurement.stall_timeout_s,
                )
            except CalibrationError as error:
                raise CalibrationError(f"{first.label}, {workload.name}: {error}") from None
            progress.advance(task)
    progress.remove_task(task)
    for name, calibration in found.items():
        if calibration.capacity is not None:
            progress.console.print(
                f"{name}: {first.label} serves {calibration.capacity:.3g} average requests/s; "
                f"the table's rates are sent × {calibration.factor:.3g}"
            )
    return found
