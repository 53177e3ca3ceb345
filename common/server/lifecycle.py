"""A server's life, from its port to its exit code.

```text
port taken ─> engine built ─> ready ─> SIGTERM: draining, new requests 503 ─> idle or timeout ─> exit 0
  exit 1        exit 1                  second signal ────────────────────────────────────────> exit 1
```
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import NoReturn

import uvicorn

from common.config import EngineConfig
from common.errors import StartupError
from common.phases import PhasePackage
from common.server.app import create_app
from common.server.options import ServerOptions
from common.server.service import Service
from common.trace import TraceFile
from common.worker import EngineWorker

logger = logging.getLogger(__name__)

STALL_TIMEOUT_S = 60  # a client that takes nothing of its answer for so long is gone


def serve(package: PhasePackage, options: ServerOptions, config: EngineConfig) -> int:
    """Serve until a signal: the exit code.

    Raises:
        StartupError: the port is taken, the trace's file cannot be written, or the engine cannot be built.
    """
    worker = EngineWorker(lambda: package.build_engine(config))
    with bind(options.host, options.port) as listener:  # before the model, whose loading may take minutes
        trace = None if options.trace is None else TraceFile(options.trace)
        engine = worker.build()
        names = options.served_model_name
        app = create_app(
            engine,
            worker=worker,
            model_name=names[0] if names else None,
            other_names=names[1:],
            api_keys=options.api_key,
            send_timeout_s=STALL_TIMEOUT_S,
        )
        service: Service = app.state.server
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
            service.worker,
            ready=f"ready: {engine.phase.slug} serves {service.model_name} at {address}",
            shutdown_timeout_s=options.shutdown_timeout,
        )
        if trace is not None:
            service.tracer.start(trace)  # from this thread: the engine's is idle until the server runs
        server.run(sockets=[listener])
    if worker.running:
        exit_at_once(0)  # every client has its answer: nobody waits for this step
    if trace is not None:
        service.tracer.stop(trace)
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
        self, config: uvicorn.Config, worker: EngineWorker, *, ready: str, shutdown_timeout_s: float
    ) -> None:
        super().__init__(config)
        self.worker = worker
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


def exit_at_once(code: int) -> NoReturn:
    """End the process with the engine's thread in the middle of something. The interpreter's own way out would wait
    for other threads, and end this one inside torch, which aborts."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
