"""The command `python -m phaseN_x`: a server's life, from its port to its exit code.

```text
port taken ─> engine built ─> ready ─> SIGTERM: draining, new requests 503 ─> idle or timeout ─> exit 0
  exit 1        exit 1, signal: 143     second signal ────────────────────────────────────────> exit 1
```

Wrong options (`common.server.options`) end the command with exit code 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import uvicorn

from common.errors import StartupError
from common.hosting.async_engine import AsyncEngine
from common.hosting.calls import EngineCalls
from common.hosting.process import EngineProcess
from common.observing.trace import TraceFile
from common.server.app import create_app
from common.server.http.connections import Config
from common.server.http.middleware import AllowedHosts
from common.server.http.sockets import allow_open_files, listen, url_of
from common.server.logs import configure_logging, printable
from common.server.options import ServerOptions, UsageError, read_options
from common.server.service import Service
from common.startup.phases import build_engine, find_phase
from common.startup.process_memory import freeze, freeze_objects

if TYPE_CHECKING:  # it imports torch, which this process does without
    from common.engine.engine import Engine

logger = logging.getLogger(__name__)

#: Python's own value is 5 ms. A thread that computes for long, such as one that renders a conversation, then keeps
#: the event loop waiting for as long at each of its turns.
SWITCH_INTERVAL_S = 3e-4
LAST_WORDS_S = 1.0  # at shutdown, connections get at least this long to send their last bytes


def main(
    phase_name: str,
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    process: type[EngineProcess] = EngineProcess,
) -> NoReturn:
    """Serve a phase until a signal ends it; does not return.

    Args:
        phase_name: a name that `find_phase` takes.
        argv: the flags; the process's own if None.
        prog: the name of this command in `--help`; `python -m` and the phase if None.
        process: what runs the engine.
    """
    # Until uvicorn has its own handlers. A signal without a handler never reaches a container's first process.
    signal.signal(signal.SIGTERM, _interrupt)
    freeze()  # modules: each full collection while the engine is built would scan them for 0.1 s
    try:
        package = find_phase(phase_name)
        options, config = read_options(package, sys.argv[1:] if argv is None else argv, prog)
        configure_logging(options.log_level, options.log_format)
        try:
            serve(functools.partial(build_engine, phase_name, config), options, process)
        except StartupError as error:
            if options.log_format == "text":
                raise
            logger.error(error)  # noqa: TRY400 - its traceback is of no use
            sys.exit(1)
        exit_at_once(0)
    except UsageError as error:
        exit_with(f"error: {error}", 2)
    except StartupError as error:
        exit_with(f"error: {error}", 1)
    except KeyboardInterrupt as error:  # while the engine is being built
        print("interrupted", file=sys.stderr)
        exit_at_once(128 + (signal.SIGTERM if error.args else signal.SIGINT))


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - a signal handler
    """Raise what Python raises at SIGINT, with the signal."""
    raise KeyboardInterrupt(number)


def exit_with(message: str, code: int) -> NoReturn:
    """Print a message as one line, and exit."""
    print(printable(" ".join(message.split())), file=sys.stderr)
    sys.exit(code)


def new_engine(
    build: Callable[[], Engine], options: ServerOptions, process: type[EngineProcess] = EngineProcess
) -> AsyncEngine:
    """Prepare this process for the event loop of a server, and return an engine for it, which is not built yet."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    prepare = functools.partial(configure_logging, options.log_level, options.log_format)
    return AsyncEngine(process(build, prepare))


def serve(
    build: Callable[[], Engine], options: ServerOptions, process: type[EngineProcess] = EngineProcess
) -> None:
    """Serve until a signal ends the server. A step, or work for clients that have left, may still run then.

    Args:
        build: builds the engine, in its process: as for `EngineProcess`.
        options: the server's options.
        process: what runs the engine.

    Raises:
        StartupError: the port is taken, the certificate cannot be loaded, the trace's file cannot be written, or
            the engine cannot be built.
    """
    engine = new_engine(build, options, process)
    most = allow_open_files(options.max_connections)  # of the operating system
    options = options.model_copy(update={"max_connections": most})
    check_tls(options)  # before the model, whose loading may take minutes
    with listen(options) as listener:
        if options.trace is not None:
            TraceFile(options.trace).close()  # raises StartupError now, if it cannot be written
        engine.build()
        hosts = None if options.uds else AllowedHosts(options.host, options.allowed_host)
        app = create_app(engine, options, hosts)
        service: Service = app.state.server
        address = url_of(listener, tls=options.ssl_certfile is not None)
        server = Server(
            Config(app, options, service.answers),
            service,
            ready=f"ready: {engine.facts.phase.slug} serves {service.model_name} at {address}"
            + ("" if options.uds else " (open it in a browser)"),
        )
        if options.trace is not None:
            engine.call(EngineCalls.trace_to, options.trace)
        freeze_objects()
        server.run(sockets=[listener])


def check_tls(options: ServerOptions) -> None:
    """Check that the TLS certificate and its key can be loaded, if the options name any.

    Raises:
        StartupError: a file cannot be read, the key has a password, or it does not belong to the certificate.
    """
    if options.ssl_certfile is None:
        return
    files = f"--ssl-certfile {options.ssl_certfile}"
    if options.ssl_keyfile is not None:
        files += f" --ssl-keyfile {options.ssl_keyfile}"
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A wrong password on purpose: without one, openssl would ask at the terminal for a locked key's password.
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="none")
    except OSError as error:
        raise StartupError(f"{files}: {error.strerror or error}") from None


class Server(uvicorn.Server):
    """uvicorn's server, changed so that a signal lets running requests finish before the listener closes.

    uvicorn's own handler closes the listener at once. A client that connects then gets no 503, and `/health` cannot
    say that the server is draining.
    """

    def __init__(self, config: Config, service: Service, *, ready: str) -> None:
        super().__init__(config)
        self.service = service
        self.ready = ready
        self.shutdown_timeout_s = config.options.shutdown_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._left_s = 0.0  # seconds of the shutdown timeout that draining has left

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        except OSError as error:  # another process has begun to listen at the port while the model was loaded
            raise StartupError(f"cannot listen: {error.strerror}") from None
        if self.service.engine.dead is None:  # an engine that fails this early has logged why
            logger.info(self.ready)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler
        """Drain on the first signal, exit on the second.

        A signal before `startup` ends the server without draining. Signal handlers run between any two bytecodes,
        so the event loop does the work.
        """
        if self._loop is None:  # the server has not started yet
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
        if not await self.service.engine.drain(self.shutdown_timeout_s):
            logger.warning("some requests were not done in time and have been failed")
        self._left_s = self.shutdown_timeout_s - (time.monotonic() - started)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections. Clients that are still reading their answers get the rest of the shutdown timeout,
        or `LAST_WORDS_S` seconds if less is left."""
        left_s = max(self._left_s, LAST_WORDS_S)
        self.config.timeout_graceful_shutdown = math.ceil(left_s) + 1  # for tasks without a connection
        cutting = asyncio.get_running_loop().call_later(left_s, self._cut)
        await super().shutdown(sockets)
        cutting.cancel()

    def _cut(self) -> None:
        connections = list(self.server_state.connections)
        if connections:
            logger.warning("answers of %d connections were not taken in time: closed", len(connections))
        for connection in connections:
            connection.transport.abort()


def exit_at_once(code: int) -> NoReturn:
    """End the process at once.

    A normal exit would wait for other threads, and destroy all modules and their objects, which takes 0.4 s.
    """
    with contextlib.suppress(OSError, ValueError):  # the log may be on a full disk, or closed
        logging.shutdown()
        sys.stderr.flush()
    os._exit(code)
