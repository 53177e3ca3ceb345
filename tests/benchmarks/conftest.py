"""Plans, records, and whole runs made by hand, for the tests of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks.environment
import benchmarks.micro
from benchmarks.client import Endpoint
from benchmarks.files import load_runs
from benchmarks.loadgen import LoadPlan
from benchmarks.metrics import summarize, summarize_server
from benchmarks.results import Calibration, Generator, Lineup, RequestRecord, Run, ServerInfo, WorkloadInfo
from benchmarks.workloads import PlannedRequest, PromptWriter
from common.models.registry import ZOO
from common.text.tokenizer import Tokenizer
from tests.support.forked import FORKS


@pytest.fixture(autouse=True)
def quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample the machine's load for a moment only: no test depends on it."""
    monkeypatch.setattr(benchmarks.environment, "SAMPLE_S", 0.01)


def processes_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a measurement fork its processes from one that has imported everything."""
    monkeypatch.setattr(benchmarks.micro, "multiprocessing", SimpleNamespace(get_context=lambda _: FORKS))


@pytest.fixture(scope="session")
def writer() -> PromptWriter:
    return PromptWriter(Tokenizer.from_folder(ZOO / "llama-tiny", vocab_size=2048))


def planned(index: int, at_s: float = 0.0, tokens: int = 10) -> PlannedRequest:
    """Return a request whose prompt begins with its number, so that a fake server recognizes it."""
    return PlannedRequest(index, at_s, [index, 1, 2], 3, tokens)


def plan(url: str, requests: Sequence[PlannedRequest], **options: object) -> LoadPlan:
    return LoadPlan(Endpoint(url, "fake"), list(requests), **options)  # type: ignore[arg-type]


def record(index: int, sent: float, tokens: Sequence[float], *, error: str | None = None) -> RequestRecord:
    """Return the timeline of a request. The answer ends with its last token."""
    return RequestRecord(
        index=index,
        scheduled_s=sent,
        prompt_tokens=100,
        max_tokens=max(1, len(tokens)),
        sent_s=sent,
        token_times_s=list(tokens),
        finished_s=tokens[-1] if tokens else sent + 1.0,
        completion_tokens=len(tokens),
        status=200,
        error=error,
    )


def save(folder: Path, *runs: Run) -> None:
    for run in runs:
        run.save(folder)


def saved_runs(folder: Path) -> list[Run]:
    """Return the runs that have files of their own in a folder."""
    return [run for path in sorted(folder.glob("*.json")) for run in load_runs(path)]


def make_run(
    label: str = "phase 4",
    order: float = 4,
    *,
    gap_s: float = 0.01,
    repeat: int = 1,
    workload: str = "mixed",
    comparison: str = "20260101-000000",
    quick: bool = False,
    lineup: Lineup | None = None,
) -> Run:
    """Return a complete run of four requests with evenly spaced tokens."""
    requests = [
        record(i, 0.1 * i, [0.1 * i + 0.2 + gap_s * n for n in range(20 + i)]).rounded() for i in range(4)
    ]
    counters = ("decode_tokens", "prefill_tokens", "padded_tokens", "idle_rows")
    records = [
        {
            "step": n,
            "started_s": round(0.1 * n, 5),
            "duration_s": 0.09,
            "decode_tokens": 3,
            "prefill_tokens": 100 if n < 4 else 0,
            "padded_tokens": 20 if n < 4 else 0,
            "idle_rows": 1,
            "kv_used_tokens": 100 + n,
            "kv_reserved_tokens": 400,
        }
        for n in range(12)
    ]
    after = {name: sum(step[name] for step in records) for name in counters}
    after |= {"steps": len(records), "preemptions": 0, "busy_s": 1.0}
    after |= {"prompt_tokens": 400, "cached_tokens": 100, "evictions": 3}
    return Run(
        comparison=comparison,
        repeat=repeat,
        lineup=lineup,
        started_at="2026-01-01T00:00:00+00:00",
        status="ok",
        workload=WorkloadInfo(name=workload, arrivals="burst", quick=quick),
        server=ServerInfo(label=label, order=order, model="zoo:llama-tiny"),
        calibration=Calibration(mode="auto", factor=1.0),
        environment={"cpu": "a processor"},
        generator=Generator(cpu_s=0.1, wall_s=2.0),
        metrics=summarize(requests, slo_ttft_s=1.0, slo_itl_s=0.1),
        server_metrics=summarize_server({}, after, records),
        requests=requests,
        engine_steps={name: [step[name] for step in records] for name in records[0]},
    )
