"""The command `python -m phaseN_x`: a server's life, from its port to its exit code.

```text
port taken ─> engine built ─> ready ─> SIGTERM: draining, new requests 503 ─> idle or timeout ─> exit 0
  exit 1        exit 1                  second signal ────────────────────────────────────────> exit 1
```

Wrong options (`common.server.options`) end the command with exit code 2.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import uvicorn

from common.config import EngineConfig
from common.errors import StartupError
from common.phases import PhasePackage, find_phase
from common.server.app import LAST_STEP_S, create_app
from common.server.connections import Config, ConnectionLimits, allow_open_files, find_lost_peers
from common.server.logs import configure_logging
from common.server.middleware import AllowedHosts
from common.server.options import ServerOptions, UsageError, read_options
from common.server.service import Service
from common.server.stream import Backlogs
from common.trace import TraceFile
from common.worker import EngineWorker

logger = logging.getLogger(__name__)

LAST_WORDS_S = 1.0  # time for the last bytes of answers that were cut off at the shutdown timeout


def main(phase_name: str, argv: Sequence[str] | None = None, *, prog: str | None = None) -> NoReturn:
    """Serve a phase until a signal ends it; does not return.

    Args:
        phase_name: a name that `find_phase` takes.
        argv: the flags; the process's own if None.
        prog: the name of this command in `--help`; `python -m` and the phase if None.
    """
    try:
        package = find_phase(phase_name)
        options, config = read_options(package, sys.argv[1:] if argv is None else argv, prog)
        configure_logging(options.log_level, options.log_format)
        try:
            sys.exit(serve(package, options, config))
        except StartupError as error:
            if options.log_format == "text":
                raise
            logger.error(error)  # noqa: TRY400 - its traceback is of no use
            sys.exit(1)
    except UsageError as error:
        exit_with(f"error: {error}", 2)
    except StartupError as error:
        exit_with(f"error: {error}", 1)
    except KeyboardInterrupt:  # while the engine is being built
        print("interrupted", file=sys.stderr)
        exit_at_once(130)


def exit_with(message: str, code: int) -> NoReturn:
    """Print a message as one line, and exit."""
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)


def serve(package: PhasePackage, options: ServerOptions, config: EngineConfig) -> int:
    """Serve until a signal, and return the exit code.

    Raises:
        StartupError: the port is taken, the trace's file cannot be written, or the engine cannot be built.
    """
    worker = EngineWorker(lambda: package.build_engine(config))
    limits = ConnectionLimits(
        connections=allow_open_files(options.max_connections),
        per_address=options.max_connections_per_address,
        keep_alive_s=options.keep_alive_timeout,
        receive_s=options.body_timeout,
        send_s=options.send_timeout,
    )
    check_tls(options)  # before the model, whose loading may take minutes
    with listen(options) as listener:
        trace = None if options.trace is None else TraceFile(options.trace)
        engine = worker.build()
        names = options.served_model_name
        backlogs = Backlogs(options.max_unread_bytes, options.max_total_unread_bytes, options.send_timeout)
        app = create_app(
            engine,
            worker=worker,
            model_name=names[0] if names else None,
            other_names=names[1:],
            api_keys=options.api_key,
            cors_origins=options.cors_origin,
            hosts=None if options.uds else AllowedHosts(options.host, options.allowed_host),
            root_path=options.root_path,
            body_timeout_s=options.body_timeout,
            step_timeout_s=options.step_timeout,
            backlogs=backlogs,
            live_view=options.live_view,
            admin=options.admin or bool(options.api_key),
        )
        service: Service = app.state.server
        address = url_of(listener, tls=options.ssl_certfile is not None)
        server = Server(
            Config(
                app,
                limits,
                backlogs,
                service.answers,
                loop="asyncio",  # even if uvloop is installed, as by Ray
                lifespan="on",
                ws="none",
                log_config=None,
                access_log=options.log_level == "debug",
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
            ),
            service,
            ready=f"ready: {engine.phase.slug} serves {service.model_name} at {address} (open it in a browser)",
            shutdown_timeout_s=options.shutdown_timeout,
        )
        if trace is not None:
            service.tracer.start(trace)  # from this thread: the engine's is idle until the server runs
        freeze_objects()
        server.run(sockets=[listener])
    if worker.running:
        logger.warning("the step in flight did not end within %g s: exiting without it", LAST_STEP_S)
        exit_at_once(0)  # every client has its answer: nobody waits for this step
    if trace is not None:
        service.tracer.stop(trace)
    if service.admission.busy:
        exit_at_once(0)  # threads work for clients that have left, and the interpreter would wait for them
    return 0


def freeze_objects() -> None:
    """Exclude the objects that exist by now from garbage collection.

    It stays for as long as the process serves. To look through it takes 0.1 to 0.2 s, in which no step is planned
    and no client gets a token.
    """
    gc.collect()
    gc.freeze()
    # At its end the interpreter destroys collectable objects, and libraries complain about the rest.
    atexit.register(gc.unfreeze)


@contextlib.contextmanager
def listen(options: ServerOptions) -> Iterator[socket.socket]:
    """Context manager: a server's socket, bound but not listening yet, so clients are refused until it is ready.

    Raises:
        StartupError: the address cannot be used, or is in use.
    """
    if options.uds is None:
        with bind(options.host, options.port) as listener:
            find_lost_peers(listener, options.send_timeout)
            yield listener
        return
    with bind_unix(options.uds) as listener:
        try:
            yield listener
        finally:
            options.uds.unlink(missing_ok=True)


def bind_unix(path: Path) -> socket.socket:
    """Return a socket bound to a file. The file of a server that was killed is replaced.

    Raises:
        StartupError: a server listens there, or the file cannot be made.
    """
    if _is_served(path):
        raise StartupError(f"--uds {path}: another server listens there: stop it or name another file")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            path.unlink()
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise StartupError(f"--uds {path}: {error.strerror or error}") from None
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def check_tls(options: ServerOptions) -> None:
    """Read certificate and key, if there are any.

    Raises:
        StartupError: they cannot be read, or do not belong together.
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


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to a port and not listening yet: clients are refused until the server is ready.

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
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} of {host} is in use: stop what listens there or pass another --port (0: any free one)"
            ) from None
        raise StartupError(f"--host {host} --port {port}: {error.strerror}") from None
    return listener


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL of a server that listens on a socket; `unix:` and the file for a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


class Server(uvicorn.Server):
    """uvicorn's server, but a signal lets running requests finish before the listener closes.

    uvicorn's own handler closes the listener at once: a client that comes then is refused instead of told 503, and
    `/health` cannot say that the server is draining.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, *, ready: str, shutdown_timeout_s: float
    ) -> None:
        super().__init__(config)
        self.service = service
        self.ready = ready
        self.shutdown_timeout_s = shutdown_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._left_s = 0.0  # what is left of the shutdown timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        except OSError as error:  # another process has begun to listen at the port while the model was loaded
            raise StartupError(f"cannot listen: {error.strerror}") from None
        logger.info(self.ready)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler
        """Drain on the first signal, exit on the second.

        Signal handlers run between any two bytecodes, so the event loop does the work.
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
        if not await self.service.worker.drain(self.shutdown_timeout_s):
            logger.warning("some requests were not done in time and have been failed")
        self._left_s = self.shutdown_timeout_s - (time.monotonic() - started)
        self.service.bodies.give_up()  # no new request begins; clients that are still sending a body get an error
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections. Answers that slow readers still take get the rest of the shutdown timeout."""
        left_s = max(self._left_s, LAST_WORDS_S)
        self.config.timeout_graceful_shutdown = math.ceil(left_s) + 1  # for tasks that no connection ends
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
    """End the process while the engine's thread is inside a step.

    The interpreter's own way out would wait for other threads, and end this one inside torch, which aborts.
    """
    with contextlib.suppress(OSError, ValueError):  # the log may be on a full disk, or closed
        logging.shutdown()
        sys.stderr.flush()
    os._exit(code)
