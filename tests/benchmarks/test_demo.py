"""The demo: its options, and the messages that it prints."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks import demo
from tests.benchmarks.test_servers import fake_target


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


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks://127.0.0.1:9"])
def test_a_proxy_of_the_shell_is_not_asked(
    proxy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.setattr(demo, "phase_target", lambda *_: fake_target())
    demo.write("phase4_static", Console())
    assert f"{len(demo.PROMPTS) * demo.MOST_TOKENS} tokens in " in capsys.readouterr().out


def test_a_terminal_that_lacks_a_character_gets_a_question_mark(
    served: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", terminal := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr(demo, "write", lambda phase, console: console.print("starting …"))
    demo.main(["--phases", "4"])
    terminal.seek(0)
    assert terminal.readline() == "starting ?\n"
