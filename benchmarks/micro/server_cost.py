"""A decode step in the engine alone, against the gap between tokens that the server's clients see.

The difference is the server's cost: HTTP, events, and everything else that delays the engine's thread. Both get the
same options, prompts and answers, and both are timed only while all streams decode.

```text
engine alone   a process of its own: builds the engine in its main thread and calls step()
server         a process of its own, as users start it  <── HTTP ──  the load generator, in another
```

They take turns (engine, server, engine, ...), so that a machine that slows down slows both. All processes inherit
the cores of this process: `taskset -c 0,1 python -m benchmarks micro server_cost` measures on two cores.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence

from benchmarks.calibrate import warmup_requests
from benchmarks.loadgen import run_whole_load
from benchmarks.micro import in_new_process, say, writer_for
from benchmarks.micro.engines import add, build_engine
from benchmarks.results import RequestRecord
from benchmarks.servers import Options, Setup, Target, find_phase_module, open_server, phase_target
from benchmarks.tables import Cell, MeasuredTable
from benchmarks.workloads import PlannedRequest, PromptWriter, identical_requests
from common.engine import Engine

PROMPT_TOKENS, NEW_TOKENS = 128, 128
SERVER_ONLY = ("host", "port")  # options that an engine does not have

COLUMNS = ["model", "streams", "engine alone, ms a step", "through the server, ms a token", "ratio"]

Seconds = dict[int, float]  # by number of streams


def target_of(phase: str, model: str, streams: Sequence[int]) -> Target:
    """Return the options of both: twice the memory that the streams need, so that none waits or is preempted."""
    setup = Setup(model=model, slots=max(streams), max_seq_len=2 * (PROMPT_TOKENS + NEW_TOKENS))
    return phase_target(phase, setup)


def orders_of(writer: PromptWriter, count: int) -> list[PlannedRequest]:
    return identical_requests(
        writer, count=count, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, seed=f"server cost:{count}"
    )


def engine_times(module: str, options: Options, streams: Sequence[int]) -> Seconds:
    """Return the median seconds of a decode step by number of streams, computed in the calling thread."""
    fields = {name.replace("-", "_"): value for name, value in options.items() if name not in SERVER_ONLY}
    engine = build_engine(module, **fields)
    writer = PromptWriter(engine.tokenizer)
    return {count: step_time_s(engine, orders_of(writer, count)) for count in streams}


def step_time_s(engine: Engine, orders: Sequence[PlannedRequest]) -> float:
    """Return the median seconds of the steps that bring every stream a token."""
    for order in orders:
        add(engine, order.token_ids, order.max_tokens)
    steps = []
    began = set[str]()
    while engine.has_work:
        everybody = len(began) == len(orders)
        started_s = time.perf_counter()
        outputs = engine.step()
        elapsed_s = time.perf_counter() - started_s
        if everybody and len(outputs) == len(orders):
            steps.append(elapsed_s)
        began |= {output.request_id for output in outputs}
    if not steps:
        raise RuntimeError(f"{len(orders)} streams never decoded together")
    return statistics.median(steps)


def server_times(target: Target, writer: PromptWriter, streams: Sequence[int]) -> Seconds:
    """Return the median seconds between two tokens of a stream by number of streams."""
    with open_server(target) as server:
        return {
            count: gap_s(
                run_whole_load(server.endpoint, orders_of(writer, count), warmup_requests(writer)).requests
            )
            for count in streams
        }


def gap_s(records: Sequence[RequestRecord]) -> float:
    """Return the median gap between tokens while all streams run.

    Raises:
        RuntimeError: the streams never all ran at once.
    """
    begin_s = max(record.token_times_s[0] for record in records)
    end_s = min(record.token_times_s[-1] for record in records)
    gaps = [
        later - earlier
        for record in records
        for earlier, later in itertools.pairwise(record.token_times_s)
        if begin_s <= earlier and later <= end_s
    ]
    if not gaps:
        raise RuntimeError(f"{len(records)} streams never ran at once")
    return statistics.median(gaps)


def measure(phase: str, model: str, streams: Sequence[int], turns: int) -> list[list[Cell]]:
    """Return a row for each number of streams; cells as in `COLUMNS`."""
    target = target_of(phase, model, streams)
    assert target.module is not None, "a phase is a module"
    writer = writer_for(model)
    pairs = []
    for turn in range(1, turns + 1):
        alone = in_new_process(engine_times, target.module, target.options, streams)
        served = server_times(target, writer, streams)
        pairs.append((alone, served))
        said = ", ".join(f"{n}: {alone[n] * 1e3:.3g} and {served[n] * 1e3:.3g} ms" for n in streams)
        say(f"{model}, turn {turn} of {turns}: {said}")
    return [
        [
            model,
            count,
            statistics.median(alone[count] for alone, _ in pairs) * 1e3,
            statistics.median(served[count] for _, served in pairs) * 1e3,
            statistics.median(served[count] / alone[count] for alone, served in pairs),
        ]
        for count in streams
    ]


def steps(
    phase: str = "7",
    models: tuple[str, ...] = ("dummy:llama-60m", "zoo:llama-tiny"),
    streams: tuple[int, ...] = (1, 8, 16),
    turns: int = 5,
) -> Iterator[MeasuredTable]:
    """Time decode steps alone and through the server.

    Args:
        phase: number, word or module
        streams: at once
        turns: of each; medians are shown
    """
    yield MeasuredTable(
        name="server_cost",
        title="a decode step alone and through the server",
        setup={
            "phase": find_phase_module(phase),
            "prompts and answers of": f"{PROMPT_TOKENS} and {NEW_TOKENS} tokens",
            "median of": f"{turns} turns",
        },
        columns=COLUMNS,
        rows=[row for model in models for row in measure(phase, model, streams, turns)],
    )
