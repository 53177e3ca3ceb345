"""The progress of reading weights: a bar on a terminal and a line in the log, but not for short loads."""

from __future__ import annotations

import io
import logging

import pytest

from common.models import progress

ITEMS = [("a", 3_000_000), ("b", 2_000_000)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make a terminal the process's error output. pytest undoes that between a fixture and a test."""
    made = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", made)
    return made


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load takes long."""
    monkeypatch.setattr(progress, "SHORT_S", -1.0)


@pytest.mark.usefixtures("long")
def test_a_long_load_is_shown_as_a_bar_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = open_terminal(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert list(progress.shown(ITEMS)) == ["a", "b"]
    assert "3.0/5.0 MB" in terminal.getvalue()
    assert "read 5 MB of weights in " in caplog.text


@pytest.mark.usefixtures("long")
def test_without_a_terminal_there_is_no_bar(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert list(progress.shown(ITEMS)) == ["a", "b"]
    assert capsys.readouterr().err == ""
    assert "read 5 MB of weights in " in caplog.text


@pytest.mark.usefixtures("long")
def test_a_failed_load_ends_its_bar_and_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = open_terminal(monkeypatch)

    def load() -> None:
        for item in progress.shown(ITEMS):
            if item == "b":
                raise OSError("the disk is gone")

    with caplog.at_level(logging.INFO), pytest.raises(OSError, match="gone"):
        load()
    assert terminal.getvalue().endswith("\x1b[2K")  # the bar is erased
    assert "read" not in caplog.text


def test_a_short_load_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = open_terminal(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert list(progress.shown(ITEMS)) == ["a", "b"]
    assert terminal.getvalue() == ""
    assert caplog.text == ""
