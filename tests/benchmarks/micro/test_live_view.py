"""Throughput with the live view open and closed: it is open when it should be, and a row is what columns say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.loadgen import run_whole_load
from benchmarks.micro import live_view
from benchmarks.micro.live_view import COLUMNS, measure, watching
from benchmarks.results import LoadResult
from tests.server.support import ServerProcess, eventually


@pytest.mark.slow
def test_each_turn_measures_both_and_the_view_is_open_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is, is seen by the frames that come."""
    monkeypatch.setattr(live_view, "NEW_TOKENS", 8)
    monkeypatch.setattr(live_view, "LEAST_S", 1e-9)
    open_now: list[bool] = []
    asked: list[bool] = []

    @contextmanager
    def noted(url: str) -> Iterator[list[bytes]]:
        with watching(url) as names:
            open_now.append(True)
            yield names
        open_now.clear()

    def load(*arguments: Any) -> LoadResult:
        asked.append(bool(open_now))
        return run_whole_load(*arguments)

    monkeypatch.setattr(live_view, "watching", noted)
    monkeypatch.setattr(live_view, "run_whole_load", load)
    row = measure("7", "zoo:llama-tiny", 4, 2)
    assert asked == [False, True, True, False]
    assert len(row) == len(COLUMNS)
    assert all(isinstance(cell, float) and cell > 0 for cell in row[1:])


@pytest.mark.slow
def test_the_view_is_closed_when_a_run_says_so() -> None:
    server = ServerProcess("phase5_continuous")
    try:
        for _ in range(10):  # more than may look at once
            with watching(server.url) as names:
                server.complete(max_tokens=3)
                eventually(lambda names=names: b"step" in names)
        with_nobody = ServerProcess("phase5_continuous", "--no-live-view")
        with pytest.raises(OSError, match="status 404 of /steps"), watching(with_nobody.url):
            pass
        with_nobody.close()
    finally:
        server.close()
