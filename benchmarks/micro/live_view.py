"""A server's throughput while its live view is open, against its throughput while it is closed.

```text
turn 1   closed  open      one server for all turns; a turn's two runs are the same work, and which comes
turn 2   open  closed      first changes from turn to turn, so that a machine that slows down slows both
```

The view is open as a page opens it: one reader of `/steps`, in another process than the server and the load. It
draws nothing: that is the browser's work. `zoo:llama-tiny` has steps so short that anything added to them shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.calibrate import warmup_requests
from benchmarks.client import BackgroundReader, Endpoint, EventParser
from benchmarks.loadgen import run_whole_load
from benchmarks.micro import medians, say, writer_for
from benchmarks.servers import Setup, find_phase_module, open_server, phase_target
from benchmarks.tables import Cell, MeasuredTable
from benchmarks.workloads import PlannedRequest, PromptWriter, identical_requests

PROMPT_TOKENS, NEW_TOKENS, SEATS = 64, 128, 8
LEAST_S = 6.0  # a run sends the load again until it has measured so many seconds

COLUMNS = [
    "model",
    "closed, tokens a second",
    "open, tokens a second",
    "open against closed",
    "frames a second while open",
]


@contextmanager
def watching(url: str) -> Iterator[list[bytes]]:
    """Context manager: keep a server's live view open. Yields a list that grows by the name of each event.

    Raises:
        OSError: the server has none.
    """
    parser, names = EventParser(), list[bytes]()
    reader = BackgroundReader(f"{url}/steps")
    reader.start(lambda chunk: names.extend(name for name, _ in parser.feed(chunk)))
    try:
        yield names
    finally:
        reader.stop()


def run(endpoint: Endpoint, writer: PromptWriter, requests: list[PlannedRequest]) -> tuple[float, float]:
    """Send loads until `LEAST_S` seconds are measured. Returns tokens a second, and the seconds."""
    tokens, seconds = 0, 0.0
    while seconds < LEAST_S:
        result = run_whole_load(endpoint, requests, warmup_requests(writer))
        seconds += result.duration_s
        tokens += sum(len(record.token_times_s) for record in result.requests)
    return tokens / seconds, seconds


def measure(phase: str, model: str, requests: int, turns: int) -> list[Cell]:
    """Return a row of the table for one model; cells as in `COLUMNS`."""
    writer = writer_for(model)
    orders = identical_requests(
        writer, count=requests, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, seed="live view"
    )
    setup = Setup(model=model, slots=SEATS, max_seq_len=2 * (PROMPT_TOKENS + NEW_TOKENS))
    found: list[tuple[float, float, float, float]] = []
    with open_server(phase_target(phase, setup)) as server:

        def run_open() -> tuple[float, float]:
            with watching(server.url) as names:
                rate, seconds = run(server.endpoint, writer, orders)
            return rate, names.count(b"step") / seconds

        for turn in range(turns):
            if turn % 2:
                (opened, frames), (closed, _) = run_open(), run(server.endpoint, writer, orders)
            else:
                (closed, _), (opened, frames) = run(server.endpoint, writer, orders), run_open()
            found.append((closed, opened, round(opened / closed, 4), frames))
            said = f"turn {turn + 1} of {turns}: {closed:.4g} closed, {opened:.4g} open"
            say(f"{model}, {said}")
    return [model, *medians(found)]


def throughput(
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
        rows=[measure(phase, model, requests, turns) for model in models],
    )
