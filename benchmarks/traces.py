"""Records a server's trace (`common.observing.trace`) during a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import orjson
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal

LONGEST_S = 3600  # length of a trace; `GET /trace` records no longer one
LINGER_S = 0.3  # wait for the run's last events: servers send recorded events ten times a second


@contextmanager
def kept_trace(url: str, path: Path, api_key: str | None = None) -> Iterator[list[str]]:
    """Context manager: record a server's trace into a file until the `with` block ends.

    Yields a list of problems: why there is no trace, or why it ends early. If the trace is complete, the list is
    empty after the block.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    problems: list[str] = []
    with start_blocking_portal() as portal:  # a thread that reads the trace while this one measures
        try:
            recording, _ = portal.start_task(_record, url, headers, path)
        except (OSError, httpx.HTTPError) as error:
            yield [str(error) if isinstance(error, OSError) else f"the server does not answer: {error}"]
            return
        try:
            yield problems
        finally:
            time.sleep(LINGER_S)
            recording.cancel()
    if not recording.cancelled() and (failed := recording.exception()) is not None:
        problems.append(f"it ends early: {failed!r}")
    path.write_bytes(completed(path.read_bytes()))


async def _record(
    url: str,
    headers: Mapping[str, str],
    path: Path,
    *,
    task_status: TaskStatus[None] = TASK_STATUS_IGNORED,
) -> None:
    """Copy a server's trace into a file until the server ends the trace.

    Raises:
        OSError: the server has no traces, or refuses.
    """
    timeout = httpx.Timeout(30.0, read=None)  # an idle server has nothing to send
    async with (
        httpx.AsyncClient(timeout=timeout, headers=headers, trust_env=False) as client,
        client.stream("GET", f"{url}/trace", params={"seconds": LONGEST_S}) as response,
    ):
        if response.status_code != 200:
            raise OSError(f"the server has none (status {response.status_code} of /trace)")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            task_status.started()
            async for chunk in response.aiter_raw():
                file.write(chunk)


def completed(trace: bytes) -> bytes:
    """Return a trace as a complete JSON array. If the trace breaks off within an event, that event is left out."""
    if trace.endswith(b"\n]\n"):  # the server has ended it
        return trace
    before, _, last = trace.rpartition(b"\n")
    try:
        orjson.loads(last)
    except orjson.JSONDecodeError:
        trace = before
    return trace.rstrip(b",") + b"\n]\n"
