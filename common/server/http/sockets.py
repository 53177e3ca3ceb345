"""Sockets: listening, limits that the operating system keeps, and closing without a reset."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.errors import StartupError
from common.server.options import ServerOptions

logger = logging.getLogger(__name__)

#: Connections beyond a bound (of all connections, or of one address) that still get an answer: 503, or that of a
#: path in `OPEN_PATHS`. Further connections are closed at once.
SPARE_CONNECTIONS = 32
#: Files that a server has open beside its connections: the model's, its log, the event loop's.
OTHER_FILES = 128


@contextlib.contextmanager
def listen(options: ServerOptions) -> Iterator[socket.socket]:
    """Context manager: a socket, bound but not listening yet: clients are refused until the server is ready.

    On exit, the socket is closed, and the file of a Unix socket is removed.

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
    """Return a Unix socket bound to a file. A socket's file that a killed server has left is replaced.

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


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to a port and not listening yet: clients are refused until the server is ready.

    Raises:
        StartupError: the port is in use, or the address cannot be used.
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


def find_lost_peers(listener: socket.socket, within_s: float) -> None:
    """Make the kernel end connections whose peer is gone.

    On Linux, it also ends connections whose peer takes nothing for `within_s` seconds. Sets options of the
    listening socket, which its connections inherit.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    ask_s = max(1, int(within_s / 4))
    if sys.platform == "linux":
        # Bytes for a peer, and keep-alive probes, may stay unacknowledged for this time.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(within_s * 1000))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ask_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ask_s)
    elif sys.platform == "darwin":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, ask_s)


def allow_open_files(connections: int) -> int:
    """Raise the process's limit of open files, if necessary, so that `connections` clients can be connected.

    Returns `connections`. If the limit cannot be raised high enough, raises it as high as possible, logs a warning
    and returns the number of connections that it allows, at least 1. On Windows, the limit stays as it is, and
    `connections` is returned.
    """
    if sys.platform == "win32":
        return connections
    import resource

    needed = connections + SPARE_CONNECTIONS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    if hard == resource.RLIM_INFINITY or hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    possible = max(1, hard - SPARE_CONNECTIONS - OTHER_FILES)
    logger.warning(
        "--max-connections %d would need %d open files, and this process may have %d (ulimit -Hn): %d connections",
        connections,
        needed,
        hard,
        possible,
    )
    return possible


class LingeringTransport(asyncio.Transport):
    """A socket's transport whose `close` waits for the client to stop sending.

    A socket that is closed while bytes of the client wait in it resets the connection, and the client may lose an
    answer that it has not read. So the client is told that nothing more will come, its bytes are dropped, and the
    socket is closed when the client closes it, or after `linger_s` seconds. nginx calls this a lingering close.

    Args:
        transport: the socket's own transport.
        may_be_sending: returns whether bytes of the client may be on their way.
        linger_s: most seconds that the client may go on sending.
    """

    def __init__(
        self, transport: asyncio.Transport, may_be_sending: Callable[[], bool], linger_s: float
    ) -> None:
        super().__init__()
        self._transport = transport
        self._may_be_sending = may_be_sending
        self._linger_s = linger_s
        self._lingering: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Send the rest of the answer, and close the socket.

        If the client may be sending, the socket is closed only when the client closes it, or after `linger_s`
        seconds.
        """
        if self.is_closing():
            return
        if not self._may_be_sending():
            self._transport.close()
            return
        self._lingering = asyncio.get_running_loop().call_later(self._linger_s, self._transport.close)
        # TLS cannot close one direction only: there, the client finds the end of the answer by its length.
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # reset by the client: `connection_lost` follows
                self._transport.write_eof()
        self._transport.resume_reading()

    def hurry(self, linger_s: float) -> None:
        """If the connection lingers, close it `linger_s` seconds from now."""
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = asyncio.get_running_loop().call_later(linger_s, self._transport.close)

    def on_lost(self) -> None:
        """Stop waiting: the connection is closed."""
        if self._lingering is not None:
            self._lingering.cancel()

    def is_closing(self) -> bool:
        """Return whether the connection is closed, closing or lingering. Then the client's bytes are dropped."""
        return self._lingering is not None or self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
