"""Sockets: listening, and limits that the operating system keeps."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from common.errors import StartupError
from common.server.options import ServerOptions

logger = logging.getLogger(__name__)

#: Connections beyond a bound (of all connections, or of one address) that still get an answer: 503, or that of a
#: path in `OPEN_PATHS`. Further connections are closed at once.
SPARE_CONNECTIONS = 32
#: Files that a server has open beside its connections: the model's, its log, the event loop's.
OTHER_FILES = 128

_IS_SERVED = "--uds {}: another server listens there: stop it or name another file"


@contextlib.contextmanager
def listen(options: ServerOptions) -> Iterator[socket.socket]:
    """Context manager: a socket, bound but not listening yet: clients are refused until the server is ready.

    On exit, the socket is closed, and the file of a Unix socket is removed, unless it has been replaced.

    Raises:
        StartupError: the address cannot be used, or is in use.
    """
    if options.uds is None:
        with bind(options.host, options.port) as listener:
            find_lost_peers(listener, options.send_timeout)
            yield listener
        return
    with lock_unix(options.uds), bind_unix(options.uds) as listener:
        ours = options.uds.stat()
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(ours, options.uds.lstat()):
                    options.uds.unlink()


@contextlib.contextmanager
def lock_unix(path: Path) -> Iterator[None]:
    """Context manager: this process alone may bind a Unix socket's file. Raises StartupError.

    While servers load their models, nothing listens at their sockets yet, so only a lock keeps two of them apart.
    Its file stays.
    """
    import fcntl  # missing on Windows, as Unix sockets are

    try:
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise StartupError(f"--uds {path}: {error.strerror}") from None
    with os.fdopen(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the end of the process in any way releases it
        except OSError:
            raise StartupError(_IS_SERVED.format(path)) from None
        yield


def bind_unix(path: Path) -> socket.socket:
    """Return a Unix socket bound to a file. Replaces the file of a killed server's socket. Raises StartupError."""
    if _is_served(path):
        raise StartupError(_IS_SERVED.format(path))
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
    """Return a socket bound to a port and not listening yet. Raises StartupError if it cannot be bound."""
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
    """Make the kernel end connections whose peer is gone and, on Linux, whose peer takes nothing for `within_s`
    seconds. Sets options of the listening socket, which its connections inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        ask_s = max(1, int(within_s / 4))
        # Bytes for a peer, and keep-alive probes, may stay unacknowledged for this time.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(within_s * 1000))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ask_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ask_s)


def allow_open_files(connections: int) -> int:
    """Raise the process's limit of open files, if necessary, so that `connections` clients can be connected.
    Returns `connections`, or how many the system allows."""
    if sys.platform == "win32":
        return connections
    import resource

    needed = connections + SPARE_CONNECTIONS + OTHER_FILES
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY or now >= needed:
        return connections
    allowed = needed if most == resource.RLIM_INFINITY else min(needed, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))  # not to `most`, which macOS may refuse
    possible = max(1, connections - (needed - allowed))
    if possible < connections:
        says = (
            "--max-connections %d is too many for the %d open files of this process (ulimit -Hn): at most %d"
        )
        logger.warning(says, connections, most, possible)
    return possible
