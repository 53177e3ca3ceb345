"""The demo: its options, and the messages that it prints."""

from __future__ import annotations

import pytest

from benchmarks import demo


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the phases that the demo would race. No server is started."""
    raced: list[list[str]] = []
    monkeypatch.setattr(demo, "write", lambda phase, console: None)
    monkeypatch.setattr(demo, "chat", lambda phase, model, console: raced.append([model]))
    monkeypatch.setattr(demo, "race", lambda phases, console, *rest: raced.append([*phases, *rest[:1]]) or 0)
    return raced


def test_phases_are_numbers_or_names(served: list[list[str]]) -> None:
    assert demo.main(["--phases", "4, chunked,phase9_pipelined"]) == 0
    assert served == [["phase4_static", "phase7_chunked", "phase9_pipelined"]]


def test_what_is_no_phase_is_refused_with_a_list(
    served: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--phases", "4,12"]) == 2
    assert "'12' is no phase; there are phase4_static" in capsys.readouterr().err
    assert served == []
