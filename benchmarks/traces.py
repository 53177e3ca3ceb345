"""Keeps a server's trace (`common.trace`) while a run lasts."""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson

LONGEST_S = 3600  # a run's trace; as long as a server records for one who asks
LINGER_S = 0.3  # servers send what they have recorded ten times a second


class TraceReader:
    """Reads `GET /trace` of a server into a file, in a thread of its own, from `start` to `stop`.

    Attributes:
        problem: why there is no trace, or not all of it; None if there is.
    """

    def __init__(self, url: str, path: Path, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.netloc, timeout=30.0)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._path = path
        self._thread = threading.Thread(target=self._read, name="trace", daemon=True)
        self._stopping = False
        self.problem: str | None = None

    def start(self) -> None:
        """Open the trace. Returns once the server records, or has refused."""
        try:
            self._connection.request("GET", f"/trace?seconds={LONGEST_S}", headers=self._headers)
            self._response = self._connection.getresponse()
            if self._response.status != 200:
                self.problem = f"the server has none (status {self._response.status} of /trace)"
        except OSError as error:
            self.problem = f"the server does not answer: {error}"
        if self.problem is None:
            assert self._connection.sock is not None
            self._connection.sock.settimeout(None)  # an idle server has nothing to send
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop reading, and complete the file."""
        if self._thread.ident is not None:
            time.sleep(LINGER_S)
            self._stopping = True
            with suppress(OSError, AttributeError):  # the server has ended, and the connection with it
                self._connection.sock.shutdown(socket.SHUT_RDWR)
            self._thread.join()
        self._connection.close()

    def _read(self) -> None:
        with self._path.open("wb") as file:
            rest = b""
            try:
                while data := self._response.read1(2**16):
                    *lines, rest = (rest + data).split(b"\n")
                    file.writelines(line + b"\n" for line in lines)
            except (OSError, http.client.HTTPException) as error:
                if not self._stopping:
                    self.problem = f"it ends early: {error!r}"
            file.write(_end(rest))


def _end(rest: bytes) -> bytes:
    """Return the end of a trace whose last line may have been cut. An event must follow the comma before it."""
    if rest == b"":  # the server has ended its trace itself
        return b""
    try:
        orjson.loads(rest)
    except orjson.JSONDecodeError:
        rest = orjson.dumps({"ph": "M", "pid": 1, "name": "process_labels", "args": {"labels": "cut off"}})
    return rest + b"\n]\n"


@contextmanager
def kept_trace(url: str, path: Path, api_key: str | None = None) -> Iterator[TraceReader]:
    """Context manager: keep a server's trace of the time inside in a file."""
    reader = TraceReader(url, path, api_key)
    reader.start()
    try:
        yield reader
    finally:
        reader.stop()
