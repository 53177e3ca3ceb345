"""The command `infer`, and `make serve`, which is made of it."""

from __future__ import annotations

import shutil
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout's files as far as `make` needs them before it installs anything."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    return tmp_path


def make(checkout: Path, python: str | Path) -> subprocess.CompletedProcess[str]:
    """Let `make` prepare the environment. It cannot install anything, so it fails then."""
    command = ["make", "-C", str(checkout), ".venv/base", f"PYTHON={python}", "PIP_ARGS=--no-index"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def old_python(tmp_path: Path) -> Path:
    """A Python whose version is none that this project takes."""
    script = tmp_path / "old"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    return script


def test_make_refuses_an_old_python_before_it_installs(checkout: Path, old_python: Path) -> None:
    made = make(checkout, old_python)
    assert made.returncode != 0
    assert f"This needs Python 3.11 or newer, and {old_python} is none" in made.stdout
    assert "Installing" not in made.stdout


@pytest.mark.slow
@pytest.mark.parametrize("has_pip", [True, False])
def test_make_replaces_an_environment_that_cannot_be_used(
    has_pip: bool, checkout: Path, old_python: Path
) -> None:
    bin = checkout / ".venv" / "bin"
    (bin / "python").symlink_to(old_python if has_pip else sys.executable)
    if has_pip:
        (bin / "pip").symlink_to(old_python)
    assert "No matching distribution found" in make(checkout, sys.executable).stderr
    version = subprocess.run([bin / "python", "-m", "pip", "--version"], capture_output=True, check=False)
    assert version.returncode == 0


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
