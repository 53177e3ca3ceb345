"""Decode steps of phase 9 at each pipeline depth, without a server.

Each variant (`WAYS`) is an engine in a process of its own. The engines take turns, so that a machine that slows
down slows all. The time is that of `Engine.step`, text and stop decisions included, while all sequences decode.

```text
called     operators are called from Python, by a thread of the stream; on a GPU by the engine's thread
played     a recording is played in C++ (`kernels.tape`); on a GPU a graph is launched
```
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.micro import in_turns, processes
from benchmarks.micro.on_device import build_engine, decode, prompts_of
from benchmarks.tables import Cell, MeasuredTable
from common.engine.engine import Engine

MODELS = ("zoo:llama-tiny", "dummy:llama-60m")
PROMPT_TOKENS, NEW_TOKENS = 64, 96

#: Heading, phase and options of each variant.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "phase 8": ("8", {}),
    "depth 0, called": ("9", {"pipeline_depth": 0, "captured_steps": False}),
    "depth 2, called": ("9", {"pipeline_depth": 2, "captured_steps": False}),
    "depth 0, played": ("9", {"pipeline_depth": 0}),
    "depth 1, played": ("9", {"pipeline_depth": 1}),
    "depth 2, played": ("9", {"pipeline_depth": 2}),
}

_engine: Engine


def start(way: str, model: str, sequences: int) -> None:
    """Build the engine of a variant in this process, for `step_ms`."""
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


def step_ms(sequences: int) -> float:
    """Serve a batch, and return the mean milliseconds of a step in which all its sequences decode."""
    vocab_size = _engine.runner.model.config.vocab_size
    return decode(_engine, prompts_of(sequences, PROMPT_TOKENS, vocab_size), NEW_TOKENS).step_s * 1e3


def measure(model: str, sequences: int, repeats: int) -> dict[str, float]:
    """Time decode steps of each variant in turns. Returns the median milliseconds of a step, by variant."""
    with processes(WAYS) as started:
        for way, process in started.items():
            process.submit(start, way, model, sequences).result()

        def step_of(way: str) -> float:
            return started[way].submit(step_ms, sequences).result()

        return in_turns({way: functools.partial(step_of, way) for way in WAYS}, repeats)


def depths(
    models: tuple[str, ...] = MODELS, sequences: tuple[int, ...] = (1, 4, 16), repeats: int = 5
) -> Iterator[MeasuredTable]:
    """Time decode steps of phase 9 at each pipeline depth (most steps in flight), and of phase 8 for comparison."""
    rows: list[list[Cell]] = []
    for model, count in itertools.product(models, sequences):
        found = measure(model, count, repeats)
        rows.append([model, count, *found.values(), found["depth 0, played"] / found["depth 2, played"]])
    yield MeasuredTable(
        name="pipeline",
        title="a decode step",
        setup={"median of": f"{repeats} turns", "prompts": f"{PROMPT_TOKENS} tokens"},
        columns=["model", "sequences", *(f"{way}, ms" for way in WAYS), "depth 0 ÷ depth 2"],
        rows=rows,
    )
