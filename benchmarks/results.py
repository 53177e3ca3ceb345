"""The result of a run: everything needed to check its numbers or to draw them.

All times are in seconds. A run's clock starts at zero when its first request is due. Requests and engine steps are
on that same clock (if the server ran on the same machine as the clients), so they can be drawn over each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

RESULTS = Path("benchmarks/results")  # published results
LOCAL = RESULTS / "local"  # the default folder for new measurements; git ignores it
TABLES = "tables"  # the folder of `benchmarks.tables`, whose files are no runs
DIGITS = 5  # times are rounded to 10 µs: no clock that two processes share is more exact

Status = Literal["ok", "incomplete", "failed"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RequestRecord(_Model):
    """One request's timeline.

    Attributes:
        scheduled_s: when the request was due.
        sent_s: when the client began to send the request; None: never.
        token_times_s: when each token arrived.
        finished_s: when the answer ended, complete or with an error.
        prompt_tokens: length of the prompt as planned; `prompt_tokens_counted` is the server's own count.
        completion_tokens: the server's count; without one, the number of tokens that arrived.
        status: the status code of the HTTP answer; None: there was no answer.
    """

    index: int
    scheduled_s: float
    prompt_tokens: int
    max_tokens: int
    sent_s: float | None = None
    token_times_s: list[float] = Field(default_factory=list)
    finished_s: float | None = None
    completion_tokens: int = 0
    prompt_tokens_counted: int | None = None
    finish_reason: str | None = None
    status: int | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Return the time to first token. The request must have a token."""
        assert self.sent_s is not None
        return self.token_times_s[0] - self.sent_s

    @property
    def latency_s(self) -> float:
        """Return the time from sending to the end of the answer. The answer must have ended."""
        assert self.sent_s is not None
        assert self.finished_s is not None
        return self.finished_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Return every inter-token latency: the time from each token to the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times_s)]

    def rounded(self) -> RequestRecord:
        """Return a copy with rounded times. Metrics are computed from such copies, so a run's file gives the same
        metrics."""
        times = {name: value for name, value in self if name.endswith("_s") and isinstance(value, float)}
        rounded: dict[str, Any] = {name: round(value, DIGITS) for name, value in times.items()}
        rounded["token_times_s"] = [round(value, DIGITS) for value in self.token_times_s]
        return self.model_copy(update=rounded)


class Generator(_Model):
    """The load generator's own cost. If its share of a core is high, the generator was measured, not the server.

    Attributes:
        cpu_s, wall_s: processor time of the generator's process, and the run's length.
        max_lag_s: the longest delay between the time at which a request was due and its sending.
    """

    cpu_s: float = 0.0
    wall_s: float = 0.0
    max_lag_s: float = 0.0

    @property
    def cpu_share(self) -> float:
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0


class Percentiles(_Model):
    """Percentiles, maximum and mean of some latencies, in seconds."""

    p50: float
    p95: float
    p99: float
    max: float
    mean: float


class Distribution(_Model):
    """The distribution of many latencies, reduced to some points.

    Attributes:
        seconds: some of the latencies, in ascending order.
        counts: for each of `seconds` its place, from 1 on, among all latencies. The last is the number of all.
    """

    seconds: list[float]
    counts: list[int]

    @property
    def shares(self) -> list[float]:
        """Return for each of `seconds` the share of all latencies up to it."""
        return [count / self.counts[-1] for count in self.counts]


class Latencies(_Model):
    """The latencies of one server's complete runs, all repeats together."""

    ttft: Distribution
    itl: Distribution


class Metrics(_Model):
    """Metrics that clients see. Latencies are None if no completed request has any.

    Attributes:
        short: completed requests with fewer tokens than asked for; 0 if answers may end early.
        duration_s: from the first request's sending to the end of the last answer.
        output_tokens: tokens of completed requests only.
        arrival_rate: requests per second as they were really sent; None if there are fewer than two, or all were
            sent at one time.
        longest_stall_s: the longest time between two successive tokens of a completed request.
        slo_attainment: share of all requests that completed and met both objectives.
    """

    requests: int
    completed: int
    errors: int
    short: int
    duration_s: float
    output_tokens: int
    prompt_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    arrival_rate: float | None
    ttft_s: Percentiles | None
    itl_s: Percentiles | None
    latency_s: Percentiles | None
    longest_stall_s: float | None
    slo_attainment: float
    slo_ttft_s: float
    slo_itl_s: float


class ServerMetrics(_Model):
    """Metrics from the engine's telemetry. Counts are of this run alone, without the warm-up.

    Attributes:
        mean_batch: mean number of decoded tokens over the steps that decode; idle rows do not count.
        padded_share: the share of padding and idle rows among all computed tokens.
        cached_share: the share of prompt tokens found in the prefix cache: its hit rate.
        evictions: blocks evicted from the prefix cache.
        kv_used_mean, kv_reserved_mean: tokens of KV memory, averaged over the time in which steps ran.
        missing_steps: steps whose records had left the server's ring buffer before it was read.
    """

    steps: int
    mean_batch: float
    prefill_tokens: int
    decode_tokens: int
    padded_tokens: int
    idle_rows: int
    padded_share: float
    preemptions: int
    busy_s: float
    kv_used_mean: float
    kv_used_max: int
    kv_reserved_mean: float
    kv_reserved_max: int
    cached_share: float = 0.0
    evictions: int = 0
    missing_steps: int = 0


class Calibration(_Model):
    """The factor for arrival rates, and how it was found; see `benchmarks.calibrate`.

    Attributes:
        mode: auto (measured, or 1 for a workload without a rate), table (factor 1), or given (by `--rate`).
        factor: multiplies the rate in `workloads.toml`.
        capacity: measured requests per second, all of the workload's mean lengths; None: not measured.
        reference: the capacity that the rate in `workloads.toml` assumes, in the same unit.
        batch: requests at once while measuring.
        rounds_s: how long each round took.
        measured_on: label of the server.
    """

    mode: Literal["auto", "table", "given"]
    factor: float
    capacity: float | None = None
    reference: float | None = None
    batch: int | None = None
    rounds_s: list[float] = Field(default_factory=list)
    measured_on: str | None = None


class WorkloadInfo(_Model):
    """The workload that was sent. `rate` is in requests per second, after scaling."""

    name: str
    arrivals: str
    rate: float | None = None
    seed: int = 0
    quick: bool = False
    text: bool = False


class ServerInfo(_Model):
    """The server that answered.

    Attributes:
        label: the heading of the server's column in tables, such as `phase 5`.
        order: the sort key of that column: a phase's number, a little more for a variant of the phase. Peers have
            larger numbers, so that they stand after all phases.
        options: the options that the server was started with; None: it ran already.
        variant: in a sweep, the options that distinguish this column from other columns of the same phase.
        version: the server's answer at /version; None: it has none.
        log: the last lines that the server printed, if the run is not `ok`.
    """

    label: str
    order: float
    model: str
    options: dict[str, str] | None = None
    variant: dict[str, str] = Field(default_factory=dict)
    version: dict[str, Any] | None = None
    exit_code: int | None = None
    log: list[str] = Field(default_factory=list)


class Lineup(_Model):
    """The runs that a complete comparison has for each workload: so many (`repeats`) of each server (its label)."""

    servers: list[str]
    repeats: int


class Run(_Model):
    """One run of one workload on one server.

    Attributes:
        comparison: the comparison's name. Runs with the same name were measured together and may be compared.
        lineup: the runs that the complete comparison has; None: only this run.
        notes: reasons to doubt the numbers, such as requests that were sent late.
        latencies: of all repeats of this server; only in published files, where most runs keep no requests.
        engine_steps: the records of the engine's steps, one list for each field of a record.
    """

    schema_version: int = 2
    comparison: str
    repeat: int = 1
    lineup: Lineup | None = None
    started_at: str
    status: Status
    reason: str | None = None
    notes: list[str] = Field(default_factory=list)
    workload: WorkloadInfo
    server: ServerInfo
    calibration: Calibration | None = None
    environment: dict[str, Any]
    generator: Generator | None = None
    metrics: Metrics | None = None
    server_metrics: ServerMetrics | None = None
    latencies: Latencies | None = None
    requests: list[RequestRecord] = Field(default_factory=list)
    engine_steps: dict[str, list[int | float]] | None = None

    @property
    def file_name(self) -> str:
        quick = "-quick" if self.workload.quick else ""
        what = f"{self.workload.name}-{slug(self.server.model)}{quick}"
        return f"{what}-{self.comparison}-{safe(self.server.label)}-r{self.repeat}.json"

    def save(self, folder: Path) -> Path:
        """Write this run's file and return its path."""
        return write_whole(folder / self.file_name, self.model_dump_json() + "\n")


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file atomically, so that readers never find half of it. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    return part.replace(path)


def is_complete(runs: Sequence[Run]) -> bool:
    """Return whether a comparison has all its runs, failed runs included.

    A comparison that was stopped half-way lacks repeats, or all runs of some servers.
    """
    there = {(run.server.label, run.repeat) for run in runs}
    return all(
        (label, repeat) in there
        for run in runs
        if run.lineup is not None
        for label in run.lineup.servers
        for repeat in range(1, run.lineup.repeats + 1)
    )


def slug(name: str) -> str:
    """Make a model's name safe and short as part of a file name: `dummy:llama-60m` becomes `llama-60m`."""
    return safe(name.rstrip("/").rsplit("/", 1)[-1].removeprefix("dummy:").removeprefix("zoo:"))


def safe(name: str) -> str:
    """Make a name safe as part of a file name: `phase 4` becomes `phase-4`."""
    return "".join(char if char.isalnum() or char in ".-_" else "-" for char in name)
