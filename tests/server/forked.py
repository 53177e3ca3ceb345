"""Servers that are forked from a process which has imported torch already: two seconds less for each.

The forked process runs the same module with the same arguments as `python -m` would. Tests of the command itself
and of its environment start real ones.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any

import torch

# The process that forks imports this module, and with it all that servers import.
import common.server.serve  # noqa: F401
from common.phases import find_phase, phase_names

for phase in phase_names():
    find_phase(phase)

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


class ForkedProcess:
    """A process that runs `python -m MODULE ARGUMENTS`: as much of `subprocess.Popen` as tests use.

    Its standard streams are pipes of text.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = (os.pipe() for _ in range(3))
        child_ends = (stdin, stdout, stderr)
        start = _Start(module, arguments, child_ends)
        self._process = CONTEXT.Process(target=start.run)
        self._process.start()
        for end in child_ends:
            os.close(end)
        self.stdin = os.fdopen(to_stdin, "w")
        self.stdout, self.stderr = os.fdopen(from_stdout), os.fdopen(from_stderr)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Start:
    """The start of a forked process. Pickling it, which starting the process does, hands its pipes over."""

    def __init__(self, module: str, arguments: Sequence[str], pipes: Sequence[int]) -> None:
        self._module, self._arguments, self._pipes = module, list(arguments), pipes
        self._environment = dict(os.environ)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_pipes": [DupFd(pipe) for pipe in self._pipes]}

    def run(self) -> None:
        for number, pipe in enumerate(self._pipes):
            os.dup2(pipe.detach(), number)  # type: ignore[attr-defined]  # a DupFd by now
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
        os.environ.clear()
        os.environ.update(self._environment)
        torch.set_num_threads(1)
        sys.argv = [self._module, *self._arguments]
        runpy.run_module(self._module, run_name="__main__", alter_sys=True)
