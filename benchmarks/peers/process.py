"""Starts a worker in a process of its own, sends it orders and reads its answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.workers import protocol
from common.errors import StartupError

ROOT = Path(__file__).resolve().parents[2]
WORKERS = "benchmarks.peers.workers"
STOP_TIMEOUT_S = 20.0
LOG_LINES = 8


def command(python: Path | str, module: str, *arguments: str) -> list[str]:
    """Return the command that starts a worker. The worker needs the variables that `environment()` returns."""
    return [str(python), "-P", "-m", f"{WORKERS}.{module}", *arguments]


#: Variables that workers do not inherit. A worker's options set its number of threads, and its library decides how
#: long they spin.
NOT_INHERITED = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")


def environment() -> dict[str, str]:
    """Return a worker's environment variables: those of this process, without `NOT_INHERITED`, and a PYTHONPATH
    that finds the workers."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return kept | {"PYTHONPATH": str(ROOT)}


class WorkerProcess:
    """A worker's process, which is suspended while it has nothing to compute. Use it in a `with` statement.

    Some libraries spin while they wait (vLLM's worker takes a whole core), which would slow down the other workers.

    Attributes:
        name: name and version of the library.
    """

    def __init__(self, module: str, options: protocol.Options, python: Path | str = sys.executable) -> None:
        self._module = module
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `stop`
        self._process = subprocess.Popen(
            command(python, module),
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,  # its own: signals reach the processes that the library starts, too
        )
        try:
            self.name: str = self.ask(options._asdict())["ready"]
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send an order (see `workers.protocol`) and return the worker's answer. The worker runs meanwhile.

        Raises:
            StartupError: the worker answered with an error, or has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise StartupError(f"{self._module}: {answer['error']}")
        return answer

    def stop(self) -> None:
        """Close the input, which ends the worker; send SIGKILL if it does not end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _signal(self, number: int) -> None:
        """Send a signal to the worker and to all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):  # they have ended
            os.killpg(self._process.pid, number)

    def _ended(self) -> StartupError:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        said = "\n  ".join(lines) or "(nothing)"
        return StartupError(f"{self._module} ended (exit {code}); it printed last:\n  {said}")
