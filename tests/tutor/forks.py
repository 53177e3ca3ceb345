"""Runs pytest in forks of a process that has imported the packages that tests use, and nothing of the project.

The judge starts pytest for each solution. Importing torch and transformers takes longer than most judgements. The
project's own modules must not be imported before a solution, because then its files could not take their place.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

#: Packages that tests and the project import, and that take long.
IMPORTED = ("torch", "transformers.models.gemma3", "hypothesis.stateful", "llguidance.torch")


class Forks(subprocess.Popen[str]):
    """Stands for the module `subprocess` in `tutor.judging`. Each pytest writes to the file `output`."""

    def __init__(self, output: Path) -> None:
        self._output = output
        super().__init__([sys.executable, __file__, output], stdin=-1, stdout=-1, text=True)

    def run(self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], **_: Any) -> Any:
        """Run `python -m pytest …`. Both outputs are in `stdout`."""
        print(json.dumps([command[3:], str(cwd), dict(env)]), file=self.stdin, flush=True)
        code = int(self.stdout.readline())
        return subprocess.CompletedProcess(command, code, self._output.read_text(), "")


def main(output: Path) -> None:
    """Read commands from stdin, a line of JSON each, and print the exit code of each."""
    for module in IMPORTED:
        importlib.import_module(module)
    for line in sys.stdin:
        words, folder, variables = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(variables)
            sys.path[0] = folder
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os._exit(pytest.main(words))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
