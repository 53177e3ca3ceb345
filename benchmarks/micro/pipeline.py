"""Decode steps of phase 9 at each pipeline depth, without a server.

Every way to step is an engine in a process of its own. They take turns, so that a machine that slows down slows
all. A step is what `Engine.step` does, text and stop decisions included, while all sequences decode.

```text
called     operators are called from Python, by a thread of the stream's own; on a GPU by the engine's
played     a recording is played in C++ (`kernels.tape`); on a GPU a graph is launched
```

A second table is of the same steps beside a thread that is busy in Python and takes the interpreter's lock whenever
it can: what an event loop full of work does to an engine. `pipeline_trace` writes down when the host and the stream
did what, with and without a grammar that answers follow.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from benchmarks.micro import in_new_process
from benchmarks.tables import Cell, MeasuredTable
from common.engine import Engine
from common.grammar import Grammar
from common.phases import find_phase
from common.request import SamplingParams
from common.step_parts import StepParts

MODELS = ("zoo:llama-tiny", "dummy:llama-60m")
PROMPT_TOKENS, NEW_TOKENS = 64, 96
BUSY_TOKENS = 16  # beside a busy thread a step may take a second
TRACED_SEQUENCES, TRACED_STEPS = 8, 5
LETTERS = Grammar.regex("[a-z ]+")  # goes on for as long as tokens are asked for

#: Heading, phase and options of every way to step.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "phase 8": ("8", {}),
    "depth 0, called": ("9", {"pipeline_depth": 0, "captured_steps": False}),
    "depth 2, called": ("9", {"pipeline_depth": 2, "captured_steps": False}),
    "depth 0, played": ("9", {"pipeline_depth": 0}),
    "depth 1, played": ("9", {"pipeline_depth": 1}),
    "depth 2, played": ("9", {"pipeline_depth": 2}),
}
BUSY = ("phase 8", "depth 2, played")

_engine: Engine


def start(way: str, model: str, sequences: int) -> None:
    """Build this process's engine."""
    global _engine
    phase, options = WAYS[way]
    package = find_phase(phase)
    tokens = PROMPT_TOKENS + NEW_TOKENS
    settings: dict[str, Any] = {
        "model": model,
        "max_batch_size": sequences,
        "max_seq_len": tokens,
        "num_blocks": sequences * -(-tokens // 16),
        "enable_prefix_caching": False,
    }
    config = package.Config(**(settings | options))
    _engine = package.build_engine(config)


def decode(sequences: int, new_tokens: int = NEW_TOKENS, grammar: Grammar | None = None) -> Iterator[float]:
    """Serve a batch, and yield the seconds of each step in which all sequences decode."""
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True, grammar=grammar)
    for number in range(sequences):
        prompt = [(7 * number + i) % 200 + 3 for i in range(PROMPT_TOKENS)]
        assert _engine.add_request(_engine.create_request(prompt, params))
    before = time.perf_counter()
    while _engine.has_work:
        outputs = _engine.step()
        now = time.perf_counter()
        if sum(output.token_id is not None for output in outputs) == sequences:
            yield now - before
        before = now


def step_ms(sequences: int, busy: bool) -> float:
    """Return the mean milliseconds of a step in the middle of an answer."""
    with busy_in_python() if busy else ExitStack():
        steps = list(decode(sequences, BUSY_TOKENS if busy else NEW_TOKENS))
    return statistics.mean(steps[len(steps) // 4 : -len(steps) // 8]) * 1e3


@contextmanager
def busy_in_python() -> Iterator[None]:
    """Context manager: inside it, a thread computes in Python."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# ---------------------------------------------------------------------- a trace


class Traced(NamedTuple):
    """A part of a step on the host or on the stream, and when it ran."""

    lane: str
    what: str
    from_ms: float
    to_ms: float


def trace(sequences: int, steps: int, grammar: Grammar | None = None) -> list[Traced]:
    """Return the parts of some steps in the middle of an answer."""
    parts = StepParts(_engine)
    parts.start()
    ends = [time.monotonic() for _ in decode(sequences, grammar=grammar)]
    taken = parts.take()
    parts.stop()
    middle = len(ends) // 2
    first, last = ends[middle], ends[middle + steps]
    return [
        Traced(lane, what, (max(began, first) - first) * 1e3, (min(ended, last) - first) * 1e3)
        for lane, what, began, ended in sorted(taken, key=lambda part: part.began_s)
        if began < last and ended > first
    ]


def busy_share(spans: Sequence[Traced]) -> float:
    """Return the share of a trace in which the stream was busy, in percent."""
    whole_ms = max(span.to_ms for span in spans)
    taken_ms, until_ms = 0.0, 0.0
    for span in sorted((span for span in spans if span.lane == "stream"), key=lambda span: span.from_ms):
        taken_ms += max(0.0, span.to_ms - max(span.from_ms, until_ms))
        until_ms = max(until_ms, span.to_ms)
    return 100 * taken_ms / whole_ms


# ---------------------------------------------------------------------- the program


def measure(model: str, sequences: int, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median milliseconds of a step by way, alone and beside a busy thread."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        processes = {way: stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for way in WAYS}
        for way, process in processes.items():
            process.submit(start, way, model, sequences).result()
        found: dict[tuple[str, bool], list[float]] = {}
        for turn, busy in itertools.product(range(repeats + 1), (False, True)):
            for way in BUSY if busy else WAYS:
                taken = processes[way].submit(step_ms, sequences, busy).result()
                if turn:  # the first turn warms up
                    found.setdefault((way, busy), []).append(taken)
    alone, beside = (
        {way: statistics.median(t) for (way, b), t in found.items() if b is busy} for busy in (False, True)
    )
    return alone, beside


def traced(model: str, depth: int, grammar: Grammar | None) -> list[Traced]:
    """Return the trace of some steps at a depth. To be called in a process of its own."""
    start(f"depth {depth}, played", model, TRACED_SEQUENCES)
    step_ms(TRACED_SEQUENCES, False)  # warms up
    return trace(TRACED_SEQUENCES, TRACED_STEPS, grammar)


def depths(
    models: tuple[str, ...] = MODELS, sequences: tuple[int, ...] = (1, 4, 16), repeats: int = 5
) -> Iterator[MeasuredTable]:
    """Time decode steps at each depth, alone and beside a thread that is busy in Python."""
    alone: list[list[Cell]] = []
    beside: list[list[Cell]] = []
    for model, count in itertools.product(models, sequences):
        quiet, busy = measure(model, count, repeats)
        ratio = quiet["depth 0, played"] / quiet["depth 2, played"]
        alone.append([model, count, *(quiet[way] for way in WAYS), ratio])
        beside.append([model, count, *(busy[way] for way in BUSY)])
    setup = {"median of": f"{repeats} turns", "prompts": f"{PROMPT_TOKENS} tokens"}
    yield MeasuredTable(
        name="pipeline",
        title="a decode step",
        setup=dict(setup),
        columns=["model", "sequences", *(f"{way}, ms" for way in WAYS), "depth 0 ÷ depth 2"],
        rows=alone,
    )
    yield MeasuredTable(
        name="pipeline_busy",
        title="a decode step beside a thread busy in Python",
        setup=dict(setup),
        columns=["model", "sequences", *(f"{way}, ms" for way in BUSY)],
        rows=beside,
    )


def timelines(models: tuple[str, ...] = MODELS) -> Iterator[MeasuredTable]:
    """Trace when host and stream did what, for the drawings on phase 9's page."""
    rows: list[list[Cell]] = []
    setup = {"sequences": str(TRACED_SEQUENCES), "steps": str(TRACED_STEPS)}
    for model, grammar, depth in itertools.product(models, (None, LETTERS), (0, 2)):
        spans = in_new_process(traced, model, depth, grammar)
        runs = model if grammar is None else f"{model}, with a grammar"
        rows += [[runs, depth, *span] for span in spans]
        setup[f"{runs}, depth {depth}, stream busy"] = f"{busy_share(spans):.0f} %"
    yield MeasuredTable(
        name="pipeline_trace",
        title="where the time goes",
        setup=setup,
        columns=["what runs", "depth", "lane", "what", "from, ms", "to, ms"],
        rows=rows,
    )
