"""The table at the end of a comparison."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.report import (
    LINES,
    bases_of,
    columns_of,
    median_of,
    repetition,
    report,
)
from benchmarks.results import Run
from tests.benchmarks.conftest import make_run

THROUGHPUT = next(line for line in LINES if line.title == "output tokens / s")


def with_throughput(label: str, order: float, value: float, repeat: int = 1) -> Run:
    run = make_run(label, order, repeat=repeat)
    assert run.metrics is not None
    run.metrics.output_tokens_per_s = value
    return run


def printed(runs: list[Run]) -> str:
    console = Console(record=True, width=160, force_terminal=True)
    console.print(report(runs))
    return console.export_text()


def test_medians_and_ratios() -> None:
    runs = [with_throughput("phase 4", 4, value, n) for n, value in enumerate((90, 100, 400), 1)]
    runs += [with_throughput("phase 5", 5, value, n) for n, value in enumerate((150, 10, 160), 1)]
    assert median_of(runs[:3], THROUGHPUT) == 100
    line = next(line for line in printed(runs).splitlines() if "output tokens" in line)
    assert "100" in line
    assert "150  ×1.50" in line


@pytest.mark.parametrize(
    ("servers", "bases"),
    [
        # A peer is compared with the last phase.
        ({"phase 5": 5, "phase 12": 12, "generate()": 100.0, "vLLM": 101.0}, [None, 0, 1, 1]),
        # A variant is compared with the first column of its phase.
        ({"phase 6": 6, "phase 7, a": 7.001, "phase 7, b": 7.002, "generate()": 100.0}, [None, 0, 1, 1]),
    ],
)
def test_columns_come_in_order_and_are_compared_with_those_before(
    servers: dict[str, float], bases: list[int | None]
) -> None:
    columns = columns_of([make_run(label, servers[label]) for label in sorted(servers, reverse=True)])
    assert [column[0].server.label for column in columns] == list(servers)
    assert bases_of(columns) == bases


def test_a_failed_run_has_no_part_in_the_medians_and_is_named() -> None:
    runs = [with_throughput("phase 4", 4, 100), with_throughput("phase 4", 4, 9999, 2)]
    runs[1].status, runs[1].reason = "failed", "it fell over"
    text = printed(runs)
    assert "9,999" not in text
    assert "phase 4, run 2 failed: it fell over" in text


@pytest.mark.parametrize(
    ("model", "decoded", "share"), [("dummy:a", 41, "50%"), ("dummy:a", 82, ""), ("trained", 41, "")]
)
def test_guesses_of_random_weights_are_named(model: str, decoded: int, share: str) -> None:
    run = make_run("phase 10", 10)
    assert run.metrics is not None
    assert run.server_metrics is not None
    run.server.model = model
    run.metrics.output_tokens, run.metrics.requests = 82, 0
    run.server_metrics.decode_tokens = decoded
    assert (f"phase 10 guessed {share} of its tokens" in repetition([run])) == bool(share)
    assert ("random weights" in printed([run])) == bool(share)
