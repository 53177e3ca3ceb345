"""The command `infer`, and `make serve`, which is made of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.server import run as serve
from common.startup.phases import find_phase, phase_names
from infer import main

ROOT = Path(__file__).parents[1]


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["7", "chunked", "phase7_chunked"])
def test_serve_is_the_phases_own_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = help_of(capsys, "serve", name)
    assert said.startswith(f"usage: infer serve {name} [options]")
    with pytest.raises(SystemExit):
        serve.main("phase7_chunked", ["--help"])
    own = capsys.readouterr().out
    assert own.startswith("usage: python -m phase7_chunked [options]")
    assert said.split()[4:] == own.split()[4:]


def test_phases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["phases"]) == 0
    for line, name in zip(capsys.readouterr().out.splitlines(), phase_names(), strict=True):
        phase = find_phase(name).PHASE
        assert line.split(maxsplit=2) == [str(phase.number), name, phase.idea]


@pytest.mark.parametrize("words", ["", "sevre 7", "phases 7", "--port 0"])
def test_words_that_make_no_command(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: infer serve PHASE" in printed.err
    assert words in printed.err


@pytest.mark.parametrize("words", ["serve", "serve statik", "serve 12", "serve --port 0"])
def test_serving_what_is_no_phase_lists_the_phases(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.endswith(f"there are {', '.join(phase_names())}, by name or number\n")
    assert printed.err.count("\n") == 1


def test_an_interrupt_while_modules_are_loaded() -> None:
    """Ctrl-C ends the command with one line even while it imports modules, before any server exists."""
    script = "import sys, builtins\nload = builtins.__import__\n"
    script += (
        "def slow(name, *rest):\n    if name.startswith('common'): print('loading', flush=True); input()\n"
    )
    script += "    return load(name, *rest)\n"
    script += "import infer\nbuiltins.__import__ = slow\nsys.exit(infer.main(['serve', '7']))"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=60)
    assert (process.returncode, log) == (130, "interrupted\n")
