"""One pass beside transformers: what is timed of a batch, and the rows of the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks.__main__ as command_line
from benchmarks.micro import decode_step
from benchmarks.micro.decode_step import (
    BATCHES,
    COLUMNS,
    LONG,
    Batch,
    Timing,
    continue_ours,
    rows_of,
)
from benchmarks.tables import load_tables
from tests.benchmarks.conftest import processes_are_forks


class ScriptedEngine:
    """Stands for an engine. Each step takes the given seconds and returns a token for each of the given jobs."""

    def __init__(self, steps: Sequence[tuple[float, Sequence[int]]]) -> None:
        self.now_s = 0.0
        self._steps = list(steps)

    @property
    def has_work(self) -> bool:
        return bool(self._steps)

    def step(self) -> list[SimpleNamespace]:
        seconds, jobs = self._steps.pop(0)
        self.now_s += seconds
        return [SimpleNamespace(request_id=str(job), token_id=10 * job, error=None) for job in jobs]


@pytest.fixture
def timing_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(steps: Sequence[tuple[float, Sequence[int]]]) -> Timing:
        engine: Any = ScriptedEngine(steps)
        monkeypatch.setattr(decode_step, "add", lambda *_: None)
        monkeypatch.setattr(decode_step.time, "perf_counter", lambda: engine.now_s)
        return continue_ours(engine, [[1], [2]], 4)

    return run


def test_prefill_ends_with_the_last_first_token(timing_of: Any) -> None:
    timing = timing_of(
        [
            (1.0, []),  # a part of a prompt
            (2.0, [0]),
            (4.0, [0, 1]),  # job 1 gets its first token beside job 0's second
            (0.25, [0, 1]),
            (0.75, [0, 1]),
            (8.0, [1]),  # job 0 is done, so the step is not one of the whole batch
        ]
    )
    assert timing == Timing(7.0, 0.5, [0, 10])


def test_steps_that_only_bring_first_tokens_are_no_decode_steps(timing_of: Any) -> None:
    assert timing_of([(1.5, [0, 1])]) == Timing(1.5, None, [0, 10])


def found(seconds: Sequence[float], first_token: int = 7) -> dict[Batch, list[Timing]]:
    return {
        batch: [
            Timing(each * batch.sequences, each / 10, [first_token] * batch.sequences) for each in seconds
        ]
        for batch in BATCHES
    }


def test_our_last_phase_is_compared_with_transformers() -> None:
    contenders = {
        "phase 6": found([9.0]),
        "phase 7": found([1.0, 2.0, 6.0]),
        "transformers 5": found([4.0] * 3),
    }
    contenders["phase 6"] = found([9.0] * 3)
    stranger = contenders["phase 6"][LONG][0]
    contenders["phase 6"][LONG][0] = stranger._replace(first_tokens=[-1])
    older, newest, theirs, floor, ratio = rows_of(contenders, 0.001)
    assert [row[0] for row in (older, newest, theirs)] == list(contenders)
    assert newest[1:5] == pytest.approx([200.0, 200.0, 32_000.0, 2000.0])  # the median turn took 2 seconds
    assert floor[1:5] == [1.0, 1.0, None, None]
    assert ratio[0] == "phase 7 ÷ transformers 5"
    assert ratio[1:5] == pytest.approx([0.5] * 4)
    tokens = 3 * sum(batch.sequences for batch in BATCHES)
    assert (theirs[-1], older[-1]) == (f"{tokens} of {tokens}", f"{tokens - 1} of {tokens}")
    assert {len(row) for row in rows_of(contenders, 0.001)} == {len(COLUMNS) + 2}


@pytest.mark.slow
def test_both_contenders_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes_are_forks(monkeypatch)
    options = ["--model", "dummy:llama-1m", "--dtype", "float32", "--repeats", "1", "--phase", "5"]
    assert command_line.main(["micro", "decode_step", *options, "--out", str(tmp_path)]) == 0
    (table,) = load_tables(tmp_path)
    ours, theirs, _, _ = table.rows
    assert ours[-1] == theirs[-1] == "18 of 18"
    assert all(isinstance(cell, float) and cell > 0 for row in (ours, theirs) for cell in row[1:5])
