"""`python -m phaseN_x`: a phase's options as flags and environment, and its server from start to end.

```text
options ─> port taken ─> engine built ─> ready ─> SIGTERM: draining, new requests 503 ─> idle or timeout ─> exit 0
exit 2       exit 1        exit 1                  second signal ────────────────────────────────────────> exit 1
```
"""

from __future__ import annotations

import asyncio
import difflib
import errno
import logging
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Literal, NoReturn

import uvicorn
from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from common.config import EngineConfig
from common.errors import StartupError
from common.phases import PhasePackage, find_phase
from common.server.app import CompletionServer, create_app
from common.server.errors import shorten
from common.worker import EngineWorker

logger = logging.getLogger(__name__)

ENV_PREFIX = "INFER_"
NONE = "none"  # how an option that may have no value says so
STALL_TIMEOUT_S = 60  # a client that takes nothing of its answer for so long is gone


class ServerOptions(BaseModel):
    """Options of the server, beside those of the engine."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="info has a line for each request"
    )
    shutdown_timeout: float = Field(
        default=30.0,
        ge=0.0,
        allow_inf_nan=False,
        description="seconds that running requests get after SIGTERM",
    )


class UsageError(Exception):
    """The command line or the environment cannot be understood: one line that names the option and the mend."""


def main(phase_name: str, argv: Sequence[str] | None = None, *, prog: str | None = None) -> NoReturn:
    """Serve a phase until a signal ends it; does not return.

    Args:
        phase_name: as `find_phase` takes it.
        argv: the flags; the process's own if None.
        prog: what `--help` calls this command; `python -m` and the phase if None.

    Exit codes: 0 after a signal, 1 where serving could not begin or was cut short, 2 for wrong options.
    """
    try:
        package = find_phase(phase_name)
        options, config = read_options(package, sys.argv[1:] if argv is None else argv, prog)
        configure_logging(options.log_level)
        sys.exit(serve(package, options, config))
    except UsageError as error:
        exit_with(f"error: {error}", 2)
    except StartupError as error:
        exit_with(f"error: {error}", 1)
    except KeyboardInterrupt:  # while the engine is being built
        print("interrupted", file=sys.stderr)
        exit_at_once(130)


def exit_with(message: str, code: int) -> NoReturn:
    """Say one line, whatever line ends the message has."""
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)


def exit_at_once(code: int) -> NoReturn:
    """End the process with the engine's thread in the middle of something. The interpreter's own way out would wait
    for other threads, and end this one inside torch, which aborts."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


# ---------------------------------------------------------------------- options


def read_options(
    package: PhasePackage, argv: Sequence[str], prog: str | None = None
) -> tuple[ServerOptions, EngineConfig]:
    """The options of server and phase from flags, then the environment, then defaults.

    Raises:
        UsageError: an option is unknown, or its value is not one of its values.
    """
    settings_class = settings_for(package, prog)
    try:
        settings = settings_class(_cli_parse_args=list(argv))
    except SettingsError as error:
        raise explain_unparsed(str(error), settings_class) from None
    except ValidationError as error:
        raise explain_invalid(error) from None
    return (
        ServerOptions(**{name: getattr(settings, name) for name in ServerOptions.model_fields}),
        package.Config(**{name: getattr(settings, name) for name in package.Config.model_fields}),
    )


def settings_for(package: PhasePackage, prog: str | None = None) -> type[BaseSettings]:
    """A phase's options and the server's, with flags and environment names."""
    return type(
        "Settings",
        (ServerOptions, package.Config, BaseSettings),
        {
            "__module__": __name__,
            "__doc__": f"{package.PHASE.title}: {package.PHASE.idea}. Every option can also be set in the "
            f"environment: {ENV_PREFIX}MAX_BATCH_SIZE for --max-batch-size.",
            "__annotations__": {"port": int},
            "port": Field(
                default=package.PHASE.default_port,
                ge=0,
                le=65535,
                description=ServerOptions.model_fields["port"].description,
            ),
            "model_config": SettingsConfigDict(
                env_prefix=ENV_PREFIX,
                cli_prog_name=prog or f"python -m {package.PHASE.slug}",
                cli_kebab_case=True,
                cli_implicit_flags=True,
                cli_exit_on_error=False,
                cli_hide_none_type=True,
                cli_parse_none_str=NONE,
                env_parse_none_str=NONE,
                cli_avoid_json=True,
            ),
        },
    )


def explain_unparsed(message: str, settings_class: type[BaseSettings]) -> UsageError:
    """What the parser of flags could not make sense of, with the option that may have been meant."""
    text = message.removeprefix("error parsing CLI: ")
    unknown = re.match(r"unrecognized arguments: (\S+)", text)
    if unknown is None:
        return UsageError(f"{text}; --help lists the options")
    name = unknown[1].partition("=")[0]
    flags = [flag_of(field) for field in settings_class.model_fields]
    close = difflib.get_close_matches(name, flags, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else "--help lists the options"
    return UsageError(f"unknown option {name}: {hint}")


def explain_invalid(error: ValidationError) -> UsageError:
    """The first value that is not one of its option's, or the first options that contradict each other."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:  # options that contradict each other: the message names them
        return UsageError(first["msg"].removeprefix("Value error, "))
    field = str(first["loc"][0])
    source = f" (or {ENV_PREFIX}{field.upper()})"
    given = NONE if first["input"] is None else first["input"]
    return UsageError(f"{flag_of(field)}{source}: {first['msg']}, not {shorten(repr(given), 100)}")


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def configure_logging(level: str) -> None:
    """One concise line per event, on stderr. The HTTP server's own news are for debugging."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S", force=True
    )
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a line of the HTTP server's says what ours do not. An answer that we leave unfinished, because its
    client takes nothing, is no error: the request's own line tells of it."""
    return record.msg != "ASGI callable returned without completing response."


# ---------------------------------------------------------------------- the server's life


def serve(package: PhasePackage, options: ServerOptions, config: EngineConfig) -> int:
    """Serve until a signal: the exit code.

    Raises:
        StartupError: the port is taken, or the engine cannot be built.
    """
    worker = EngineWorker(lambda: package.build_engine(config))
    with bind(options.host, options.port) as listener:  # before the model, whose loading may take minutes
        engine = worker.build()
        app = create_app(engine, worker=worker, send_timeout_s=STALL_TIMEOUT_S)
        completions: CompletionServer = app.state.server
        address = url_of(listener)
        server = Server(
            uvicorn.Config(
                app,
                lifespan="on",
                ws="none",
                log_config=None,
                access_log=options.log_level == "debug",
                timeout_graceful_shutdown=1,  # replaced by what is left of the shutdown timeout
            ),
            completions,
            ready=f"ready: {engine.phase.slug} serves {completions.model_name} at {address}",
            shutdown_timeout_s=options.shutdown_timeout,
        )
        server.run(sockets=[listener])
    if worker.running:
        exit_at_once(0)  # every client has its answer: nobody waits for this step
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A socket with its port, not listening yet: clients are refused until the server is ready.

    Raises:
        StartupError: the port is in use, or the address is not one of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartupError(f"--host {host}: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":
            # Connections inherit it: the kernel ends one whose peer takes nothing of what waits for it for a
            # minute. The app gives such a reader up too, but cannot make its socket and buffers go away.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_TIMEOUT_S * 1000)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} of {host} is in use: stop what listens there or pass another --port (0: any free one)"
            ) from None
        raise StartupError(f"--host {host} --port {port}: {error.strerror}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, but a signal lets what runs finish before the listener closes.

    uvicorn's own handler closes the listener at once: a client that comes then is refused instead of told 503, and
    `/health` cannot say that the server is draining.
    """

    def __init__(
        self, config: uvicorn.Config, completions: CompletionServer, *, ready: str, shutdown_timeout_s: float
    ) -> None:
        super().__init__(config)
        self.worker = completions.worker
        self.ready = ready
        self.shutdown_timeout_s = shutdown_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        except (
            OSError
        ) as error:  # somebody was quicker to listen at our port while the model was being loaded
            raise StartupError(f"cannot listen: {error.strerror}") from None
        logger.info(self.ready)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler
        """The first signal begins to drain; the second ends everything now. The handlers run between any two
        bytecodes, so the event loop does the work."""
        if self._loop is None:  # the event loop has not come to the listener yet
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(sig).name)

    def _on_signal(self, name: str) -> None:
        if self._draining is not None:
            logger.warning("%s again: exiting now", name)
            exit_at_once(1)  # uvicorn's own way has a traceback for every connection
        logger.info(
            "%s: finishing what runs, for up to %g s; a second signal ends it at once",
            name,
            self.shutdown_timeout_s,
        )
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        started = time.monotonic()
        if not await self.worker.drain(self.shutdown_timeout_s):
            logger.warning("some requests were not done in time and have been failed")
        left = self.shutdown_timeout_s - (time.monotonic() - started)
        # Answers may still be on their way to slow readers; those get the rest of the time, and a moment at least.
        self.config.timeout_graceful_shutdown = max(math.ceil(left), 2)
        self.should_exit = True
