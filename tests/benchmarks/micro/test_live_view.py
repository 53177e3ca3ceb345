"""Throughput with the live view open and closed: it is open when it should be, and a row is what columns say."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.loadgen import LoadPlan, LoadResult
from benchmarks.micro import live_view
from benchmarks.micro.live_view import COLUMNS, duration_s, measure, watching
from tests.benchmarks.conftest import record
from tests.server.support import ServerProcess, eventually


def test_a_run_is_timed_from_the_first_request_to_the_last_token() -> None:
    assert duration_s([record(0, 1.0, [2.0, 3.0]), record(1, 0.5, [2.5, 6.0])]) == 5.5
    with pytest.raises(RuntimeError, match="1 of 1 requests failed: dropped"):
        duration_s([record(0, 0.0, [1.0], error="dropped")])


@pytest.mark.slow
def test_each_turn_measures_both_and_the_view_is_open_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is, is seen by the frames that come."""
    monkeypatch.setattr(live_view, "NEW_TOKENS", 8)
    monkeypatch.setattr(live_view, "LEAST_S", 1e-9)
    open_now: list[bool] = []
    asked: list[bool] = []

    class Noted(live_view.Watching):
        def start(self) -> None:
            super().start()
            open_now.append(True)

        def stop(self) -> None:
            super().stop()
            open_now.clear()

    def load(plan: LoadPlan) -> LoadResult:
        asked.append(bool(open_now))
        return run_load(plan)

    run_load = live_view.run_load
    monkeypatch.setattr(live_view, "Watching", Noted)
    monkeypatch.setattr(live_view, "run_load", load)
    row = measure("7", "zoo:llama-tiny", 4, 2, Console(quiet=True))
    assert asked == [False, True, True, False]
    assert len(row) == len(COLUMNS)
    assert all(isinstance(cell, float) and cell > 0 for cell in row[1:])


@pytest.mark.slow
def test_the_view_is_closed_when_a_run_says_so() -> None:
    server = ServerProcess("phase5_continuous")
    try:
        for _ in range(10):  # more than may look at once
            with watching(server.url) as watched:
                server.complete(max_tokens=3)
                eventually(lambda watched=watched: watched.frames > 0)
        with_nobody = ServerProcess("phase5_continuous", "--no-live-view")
        with pytest.raises(RuntimeError, match="did not open"), watching(with_nobody.url):
            pass
        with_nobody.close()
    finally:
        server.close()
