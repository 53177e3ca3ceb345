"""A server's throughput while its live view is open, against its throughput while it is closed.

```text
turn 1   closed  open      one server for all turns; a turn's two runs are the same work, and which comes
turn 2   open  closed      first changes from turn to turn, so that a machine that slows down slows both
```

The view is open as a page opens it: one reader of `/steps`, in another process than the server and the load. It
draws nothing: that is the browser's work. `zoo:llama-tiny` has steps so short that anything added to them shows.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from urllib.parse import urlsplit

from rich.console import Console

from benchmarks.calibrate import warmup_requests
from benchmarks.client import Endpoint, EventParser
from benchmarks.loadgen import LoadPlan, run_load
from benchmarks.results import RequestRecord
from benchmarks.servers import Setup, find_phase_module, open_server, phase_target
from benchmarks.tables import Cell, MeasuredTable
from benchmarks.workloads import PlannedRequest, PromptWriter, identical_requests
from common.models.registry import open_checkpoint

PROMPT_TOKENS, NEW_TOKENS, SEATS = 64, 128, 8
LEAST_S = 6.0  # a run is as many loads, one after the other, as take so long

COLUMNS = [
    "model",
    "closed, tokens a second",
    "open, tokens a second",
    "open against closed",
    "frames a second while open",
]


class Watching:
    """Reads a server's live view in a thread, as an open page does.

    Attributes:
        frames: how many it has got.
    """

    def __init__(self, url: str) -> None:
        self.frames = 0
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc)
        self._thread = threading.Thread(target=self._read)

    def start(self) -> None:
        """Open the view.

        Raises:
            RuntimeError: the server has none.
        """
        self._connection.request("GET", "/steps")
        self._response = self._connection.getresponse()
        if self._response.status != HTTPStatus.OK:
            raise RuntimeError(f"the live view did not open: {self._response.read(300)!r}")
        self._thread.start()

    def stop(self) -> None:
        """Hang up. The socket is shut down, because closing it while a thread reads from it sends nothing."""
        assert self._connection.sock is not None
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _read(self) -> None:
        parser = EventParser()
        with contextlib.suppress(http.client.IncompleteRead):  # which is how `stop` ends it
            while chunk := self._response.read1(1 << 16):
                self.frames += sum(name == b"step" for name, _ in parser.feed(chunk))


@contextmanager
def watching(url: str) -> Iterator[Watching]:
    watched = Watching(url)
    watched.start()
    try:
        yield watched
    finally:
        watched.stop()


def orders_of(writer: PromptWriter, count: int) -> list[PlannedRequest]:
    return identical_requests(
        writer, count=count, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, seed="live view"
    )


def duration_s(records: Sequence[RequestRecord]) -> float:
    """Return the seconds from the first request to the last token.

    Raises:
        RuntimeError: a request failed.
    """
    errors = [record.error for record in records if record.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(records)} requests failed: {errors[0]}")
    sent = [record.sent_s for record in records if record.sent_s is not None]
    return max(record.token_times_s[-1] for record in records) - min(sent)


def measure(phase: str, model: str, requests: int, turns: int, console: Console) -> list[Cell]:
    """Return a row of the table for one model; cells as in `COLUMNS`."""
    writer = PromptWriter(open_checkpoint(model).tokenizer())
    target = phase_target(
        phase, Setup(model=model, slots=SEATS, max_seq_len=2 * (PROMPT_TOKENS + NEW_TOKENS))
    )
    pairs, frames = [], []
    with open_server(target) as server:
        plan = LoadPlan(
            Endpoint(server.url, server.model), orders_of(writer, requests), warmup=warmup_requests(writer)
        )

        def run() -> tuple[float, float]:
            """Return tokens a second, and how many seconds were measured."""
            tokens, seconds = 0, 0.0
            while seconds < LEAST_S:
                records = run_load(plan).requests
                seconds += duration_s(records)
                tokens += sum(len(record.token_times_s) for record in records)
            return tokens / seconds, seconds

        def run_open() -> float:
            with watching(server.url) as watched:
                rate, seconds = run()
            frames.append(watched.frames / seconds)
            return rate

        for turn in range(turns):
            if turn % 2:
                opened, closed = run_open(), run()[0]
            else:
                closed, opened = run()[0], run_open()
            pairs.append((closed, opened))
            console.print(
                f"{model}, turn {turn + 1} of {turns}: {closed:.4g} closed, {opened:.4g} open",
                highlight=False,
            )
    return [
        model,
        statistics.median(closed for closed, _ in pairs),
        statistics.median(opened for _, opened in pairs),
        round(statistics.median(opened / closed for closed, opened in pairs), 4),
        statistics.median(frames),
    ]


def throughput(
    console: Console,
    phase: str = "7",
    models: tuple[str, ...] = ("dummy:llama-60m", "zoo:llama-tiny"),
    requests: int = 32,
    turns: int = 5,
) -> Iterator[MeasuredTable]:
    """Measure throughput with the view open and closed.

    Args:
        phase: number, word or module
        requests: in a load
        turns: of both; medians are shown
    """
    yield MeasuredTable(
        name="live_view",
        title="throughput while the live view is open",
        setup={
            "phase": find_phase_module(phase),
            "seats": str(SEATS),
            "requests in a load": str(requests),
            "prompts and answers of": f"{PROMPT_TOKENS} and {NEW_TOKENS} tokens",
            "median of": f"{turns} turns",
        },
        columns=COLUMNS,
        rows=[measure(phase, model, requests, turns, console) for model in models],
    )
