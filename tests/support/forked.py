"""Starts servers and other commands as forks of a process that has imported everything.

A server imports torch and the project in both of its processes, which takes longer than most tests. So one process,
`multiprocessing`'s fork server, imports everything once, and the servers that tests start are forked from it. Such
a server forks its engine's process, too. Otherwise it runs the code of `python -m phaseN_x`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from common.hosting import child, process
from common.server import run
from common.startup.phases import find_phase, phase_names

# A phase's package imports torch when a name of it is used.
IMPORTED = [run.main, child.serve, *(find_phase(name).build_engine for name in phase_names())]

FORKS = multiprocessing.get_context("forkserver")
# A new process imports the main module of its parent, which is pytest's.
FORKS.set_forkserver_preload([__name__, "pytest"])
# torch reads it when it is imported. Test workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The fork server imports this, too. `EngineProcess` blocks signals while it starts a process. Had that started the
# fork server, no server forked from it later would ever see a SIGTERM.
signal.pthread_sigmask(signal.SIG_UNBLOCK, process.IGNORED_SIGNALS)

T = TypeVar("T")


class Forked:
    """A command's process, with those methods of `subprocess.Popen` that tests call.

    Args:
        module: the module whose function `main` is the command.
        arguments: the arguments of `main`.
        env: environment variables beside those of the tests. A variable that a library reads when it is imported
            has the value that it had when the first of these processes was started.
    """

    def __init__(self, module: str, *arguments: Any, env: dict[str, str] | None = None) -> None:
        (stdin, ours), *outputs = (FORKS.Pipe(duplex=False) for _ in range(3))
        self.stdin = os.fdopen(os.dup(ours.fileno()), "w")
        self.stdout, self.stderr = (os.fdopen(os.dup(read.fileno())) for read, _ in outputs)
        streams = [stdin, *(write for _, write in outputs)]
        self._process = FORKS.Process(
            target=_run, args=(streams, os.environ | (env or {}), module, arguments)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a server", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def finish(self, text: str = "") -> tuple[int, str, str]:
        """Write a text to the command and wait for its end. Returns its exit code and both of its outputs."""
        with self.stdin, self.stdout, self.stderr:
            self.stdin.write(text)
            self.stdin.close()
            printed, logged = self.stdout.read(), self.stderr.read()
        return self.wait(), printed, logged


def in_a_fork(function: Callable[..., T], *arguments: Any) -> T:
    """Call a module's function in a new process that has imported everything. Returns its result."""
    with ProcessPoolExecutor(1, mp_context=FORKS) as pool:
        return pool.submit(function, *arguments).result()


def memory_bytes(entry: str) -> int:
    """Return an entry of this process's memory: "VmRSS", what it has now, or "VmHWM", the most that it had."""
    return int(re.search(rf"{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def _run(
    streams: Sequence[Connection], variables: dict[str, str], module: str, arguments: Sequence[Any]
) -> None:
    """Run a command with these standard streams and environment variables. Runs in the new process."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    # Python's own were opened for other files.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(variables)
    process.SPAWN = multiprocessing.get_context("fork")  # type: ignore[assignment]
    sys.exit(importlib.import_module(module).main(*arguments))
