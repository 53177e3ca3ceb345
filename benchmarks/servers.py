"""Starts and stops servers, and knows the options that each phase is started with."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from benchmarks.client import Endpoint
from common.errors import StartupError
from common.startup.phases import phase_names, phase_number, phases_in_words

START_TIMEOUT_S = 600.0  # a large checkpoint from a slow disk takes minutes
STOP_TIMEOUT_S = 45.0  # longer than a server's own --shutdown-timeout
LOG_LINES = 200

#: Variables of the shell that concern other servers: with them, a started server would want a key that nobody sends
#: it, listen elsewhere, or write over a trace.
FOREIGN_VARIABLES = (
    "INFER_API_KEY",
    "INFER_UDS",
    "INFER_SSL_CERTFILE",
    "INFER_SSL_KEYFILE",
    "INFER_TRACE",
    "VLLM_API_KEY",
    "LLAMA_API_KEY",
)

Options = dict[str, str]  # long options without their dashes; a flag's value is empty


@dataclass(frozen=True, slots=True)
class Setup:
    """Options that all servers of a comparison have in common.

    Attributes:
        slots: the KV memory, as a number of sequences of full length. Every phase gets memory for
            `slots × max_seq_len` tokens.
        extra: further options, by phase number (`6`) or for `all`.
    """

    model: str = "dummy:llama-60m"
    slots: int = 8
    max_seq_len: int = 4096
    device: str = "auto"
    dtype: str = "auto"
    extra: Mapping[str, Options] = field(default_factory=dict)

    @property
    def kv_tokens(self) -> int:
        return self.slots * self.max_seq_len


# ---------------------------------------------------------------------------------------------- phases

BLOCK_SIZE = 16
SEQUENCES_PER_SLOT = 3  # paged phases compute this many sequences in the memory of one full-length slot
FIRST_WITH_BLOCKS = 6  # earlier phases reserve memory of full length for each sequence


def memory_options(phase: int, setup: Setup) -> Options:
    """Return the options that set a phase's KV memory and batch size. All phases get the same KV memory."""
    if phase < FIRST_WITH_BLOCKS:
        return {"max-batch-size": str(setup.slots)}
    return {
        "max-batch-size": str(setup.slots * SEQUENCES_PER_SLOT),
        "block-size": str(BLOCK_SIZE),
        "num-blocks": str(setup.kv_tokens // BLOCK_SIZE),
    }


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure, and how to start it.

    Attributes:
        label: the heading of its column in tables and plots.
        order: the sort key of that column.
        module: run as `python -m module`; None if `program` or `url` is given.
        options: the options that the server is started with.
        variant: in a sweep, the options that distinguish this column from other columns of the same phase.
        program: the command to run if `module` is None.
        environment: environment variables that the server gets in addition to those of this process.
        url: a server that runs already; nothing is started then.
        request_fields: extra fields in the body of every request to this server.
    """

    label: str
    order: float
    module: str | None
    options: Options
    variant: Options = field(default_factory=dict)
    program: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    request_fields: Mapping[str, bool] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        program = [sys.executable, "-m", self.module] if self.module else list(self.program)
        for name, value in self.options.items():
            program += [f"--{name}", value] if value else [f"--{name}"]
        return program


def find_phase_module(name: str) -> str:
    """Return the module of a phase by its number (`4`), a part of its name (`static`) or its full name, without
    importing it.

    Raises:
        StartupError: no phase, or more than one, has that name.
    """
    names = phase_names()
    if name in names:
        return name
    matches = [
        module
        for module in names
        if (int(name) == phase_number(module) if name.isdecimal() else name in module.partition("_")[2])
    ]
    if len(matches) != 1:
        what = f"could be {', '.join(matches)}" if matches else f"is no phase; there are {phases_in_words()}"
        raise StartupError(f"--phases: {name!r} {what}")
    return matches[0]


VARIANT_STEP = 0.001  # difference in `Target.order` between two variants of one phase


def phase_target(name: str, setup: Setup, variant: Options | None = None, place: int = 0) -> Target:
    """Return how to start a phase so that it can be compared with the other phases.

    Args:
        variant: the options of this column of a sweep.
        place: the number of the column in the sweep, from 1; 0 without a variant.

    Raises:
        StartupError: there is no such phase.
    """
    module = find_phase_module(name)
    number = phase_number(module)
    options = {
        "model": setup.model,
        "device": setup.device,
        "dtype": setup.dtype,
        "seed": "0",
        "generation-config": "none",  # requests are greedy: a model's repetition_penalty would change their tokens
        "max-seq-len": str(setup.max_seq_len),
    }
    options |= memory_options(number, setup)
    for key in ("all", str(number)):
        options |= setup.extra.get(key, {})
    variant = variant or {}
    label = ", ".join((f"phase {number}", *(f"{k}={v}" if v else k for k, v in variant.items())))
    order = number + place * VARIANT_STEP
    return Target(label, order, module, options | variant, variant)


def copy_target(text: str, setup: Setup) -> Target:
    """Return how to start a phase with the files of a folder in place of its own (see `tutor.overlay`).

    Args:
        text: the phase and the folder, such as `5=learn/phase5`.

    Raises:
        StartupError: there is no such phase, or no such folder.
    """
    name, _, folder = text.partition("=")
    phase = phase_target(name, setup)
    if not (folder and Path(folder).is_dir()):
        raise StartupError(f"--copy {text}: expected PHASE=FOLDER, such as 5=learn/phase5")
    program = (sys.executable, "-m", "tutor.overlay", folder, "tutor.serving", find_phase_module(name))
    return replace(phase, label=f"your {phase.label}", order=phase.order + 0.5, module=None, program=program)


# ---------------------------------------------------------------------------------------------- processes


class RunningServer:
    """A server's process, from start to stop. Use it in a `with` statement.

    Args:
        target: how to start the server. It gets `--host` and `--port` in addition: a free port of this machine.
        start_timeout_s: seconds until the server must answer.
        stop_timeout_s: seconds after SIGTERM until the server is killed.
        own_group: start the server in a process group of its own, which Ctrl-C in the terminal does not reach.

    Attributes:
        url: where the server listens.
        model: the server's name for its model.
        version: the server's answer at /version; None: it has none.
        log: the last lines that the server printed to stderr.
    """

    def __init__(
        self,
        target: Target,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        own_group: bool = False,
    ) -> None:
        self.target = target
        self.url = ""
        self.model = ""
        self.version: dict[str, Any] | None = None
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process_group = 0 if own_group else None
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> RunningServer:
        """Start the server unless it is launched, and wait until it answers.

        Raises:
            StartupError: as `wait_until_ready`.
        """
        self.launch()
        self.wait_until_ready()
        return self

    def launch(self) -> None:
        """Start the server's process, unless it was started before. Returns at once."""
        if self._process is not None:
            return
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
        # A thread reads stderr all the time: a full pipe would block the server in the middle of a run.
        self._process = subprocess.Popen(
            [*self.target.command, "--host", "127.0.0.1", "--port", str(port)],
            env={**inherited, **self.target.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=self._process_group,
        )
        self._reader = threading.Thread(target=self._read_log, name="server log", daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        """Wait until the launched server answers. A server that does not is stopped.

        Raises:
            StartupError: the server ended, did not answer in time (the message has the last lines that it printed),
                or lists no model.
        """
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def endpoint(self) -> Endpoint:
        """Return the address of the server and the form of its requests."""
        return Endpoint(self.url, self.model, fields=self.target.request_fields)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return the exit code; None before the server has ended."""
        return self._process.poll() if self._process else None

    def stop(self) -> int:
        """Send SIGTERM, then SIGKILL if the server does not end in time. Returns its exit code."""
        assert self._process is not None
        assert self._reader is not None
        self._process.terminate()
        try:
            self._process.wait(self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5.0)
        return self._process.returncode

    def _read_log(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self.log.extend(line.rstrip() for line in lines)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while time.monotonic() < deadline and self.exit_code is None:
                if self._is_healthy(client):
                    self.model = served_model(client, self.url)
                    self.version = server_version(client, self.url)
                    return
                time.sleep(0.1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert self._process is not None
            self._process.wait(max(0.0, deadline - time.monotonic()))  # its log ends before it does
        said = "\n  ".join(list(self.log)[-15:]) or "(nothing)"
        how = f"ended (exit {self.exit_code})" if self.exit_code is not None else "did not answer in time"
        raise StartupError(f"{self.target.label} {how}; it printed last:\n  {said}")

    def _is_healthy(self, client: httpx.Client) -> bool:
        try:
            return client.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False


class ForeignServer(RunningServer):
    """A server that runs already. It is neither started nor stopped."""

    def launch(self) -> None:
        pass

    def wait_until_ready(self) -> None:
        self.url = self.target.url.rstrip("/").removesuffix("/v1")
        with httpx.Client(timeout=10.0, trust_env=False) as client:
            self.model = self.target.options.get("model") or served_model(client, self.url)
            self.version = server_version(client, self.url)

    def stop(self) -> int:
        return 0


def open_server(target: Target) -> RunningServer:
    """Return a context manager for a target's server. It starts and stops the server, unless `url` is given."""
    return ForeignServer(target) if target.url else RunningServer(target)


def free_port() -> int:
    """Return a port of this machine at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def served_model(client: httpx.Client, url: str) -> str:
    """Return the first model that a server lists.

    Raises:
        StartupError: the server lists no model, or does not answer.
    """
    try:
        name: str = client.get(f"{url}/v1/models").json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise StartupError(
            f"{url}/v1/models names no model ({type(error).__name__}); give --model-name"
        ) from None
    return name


def server_version(client: httpx.Client, url: str) -> dict[str, Any] | None:
    """Return the JSON object that a server answers at /version; None if there is no such answer."""
    try:
        version = client.get(f"{url}/version").raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return None
    return version if isinstance(version, dict) else None
