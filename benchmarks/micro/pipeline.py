"""Decode steps of phase 9 at each pipeline depth, without a server.

Each variant (`WAYS`) is an engine in a process of its own. The engines take turns, so that a machine that slows
down slows all. The time is that of `Engine.step`, text and stop decisions included, while all sequences decode.

```text
called     operators are called from Python, by a thread of the stream's own; on a GPU by the engine's
played     a recording is played in C++ (`kernels.tape`); on a GPU a graph is launched
```

A second table has the same steps beside a thread that is busy in Python, and takes the interpreter's lock whenever
it can, like an event loop full of work.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.micro import in_turns
from benchmarks.micro.engines import add, build_engine
from benchmarks.tables import Cell, MeasuredTable
from common.engine import Engine

MODELS = ("zoo:llama-tiny", "dummy:llama-60m")
PROMPT_TOKENS, NEW_TOKENS = 64, 96
BUSY_TOKENS = 16  # beside a busy thread a step may take a second

#: Heading, phase and options of each variant.
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
    tokens = PROMPT_TOKENS + NEW_TOKENS
    _engine = build_engine(
        phase,
        model=model,
        max_batch_size=sequences,
        max_seq_len=tokens,
        num_blocks=sequences * -(-tokens // 16),
        enable_prefix_caching=False,
        **options,
    )


def decode(sequences: int, new_tokens: int = NEW_TOKENS) -> Iterator[float]:
    """Serve a batch, and yield the seconds of each step in which all sequences decode."""
    for number in range(sequences):
        add(_engine, [(7 * number + i) % 200 + 3 for i in range(PROMPT_TOKENS)], new_tokens)
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


def measure(model: str, sequences: int, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median milliseconds of a step by way, alone and beside a busy thread."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        processes = {way: stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for way in WAYS}
        for way, process in processes.items():
            process.submit(start, way, model, sequences).result()

        def step_of(way: str, busy: bool) -> float:
            return processes[way].submit(step_ms, sequences, busy).result()

        asked = [*((way, False) for way in WAYS), *((way, True) for way in BUSY)]
        found = in_turns({each: functools.partial(step_of, *each) for each in asked}, repeats)
    return {way: found[way, False] for way in WAYS}, {way: found[way, True] for way in BUSY}


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
