"""Keeps a server's trace (`common.trace`) while a run lasts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from benchmarks.client import BackgroundReader

LONGEST_S = 3600  # of a run's trace: the most that `GET /trace` records
LINGER_S = 0.3  # servers send what they have recorded ten times a second


@contextmanager
def kept_trace(url: str, path: Path, api_key: str | None = None) -> Iterator[list[str]]:
    """Context manager: record a server's trace into a file until the `with` block ends.

    Yields a list of problems: why there is no trace, or why it ends early. It is empty if the trace is whole.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reader = BackgroundReader(f"{url}/trace?seconds={LONGEST_S}", headers)
    except OSError as error:
        yield [str(error)]
        return
    problems: list[str] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        reader.start(file.write)
        try:
            yield problems
        finally:
            time.sleep(LINGER_S)
            reader.stop()
    if reader.error is not None:
        problems.append(f"it ends early: {reader.error!r}")
    path.write_bytes(completed(path.read_bytes()))


def completed(trace: bytes) -> bytes:
    """Return a trace as a whole JSON array. If its last event was cut, that event is left out."""
    if trace.endswith(b"\n]\n"):  # the server has ended it
        return trace
    before, _, last = trace.rpartition(b"\n")
    try:
        orjson.loads(last)
    except orjson.JSONDecodeError:
        trace = before
    return trace.rstrip(b",") + b"\n]\n"
