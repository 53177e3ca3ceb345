"""The time of a decode step on the host, part by part: everything but the model.

A real engine serves real requests on the tiny zoo model. Only the forward pass is replaced, by a function that
returns the same logits each time. So the times are those of Python and of small tensors, whatever the size of
the model's layers.

```text
scheduling   retire, release, make_room, admit, plan
metadata     tokens, positions, block tables and lengths of the plan's passes
sampling     logits to token ids
commit       ids to text, stop decisions and outputs
```
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.micro.engines import add, build_engine
from benchmarks.servers import BLOCK_SIZE, find_phase_module
from benchmarks.tables import Cell, MeasuredTable
from common.engine.engine import Engine
from common.observing.step_parts import StepParts

MODEL = "zoo:llama-tiny"
PROMPT_TOKENS, STEPS = 16, 200
#: The table's columns, and the name of each part in `common.observing.step_parts`.
PARTS = {"scheduling": "plan", "metadata": "pass", "sampling": "sample", "commit": "commit"}


def engine_without_passes(phase: str, sequences: int) -> Engine:
    """Build an engine for `sequences` sequences, with forward passes that take no time."""
    # A multiple of the block size. Otherwise the pool could not hold all sequences.
    length = -(-(PROMPT_TOKENS + STEPS) // BLOCK_SIZE) * BLOCK_SIZE
    engine = build_engine(phase, model=MODEL, max_batch_size=sequences, max_seq_len=length)
    runner: Any = engine.runner  # Any: its model is replaced below
    model = runner.model
    logits = torch.randn(sequences, model.config.vocab_size, generator=torch.Generator().manual_seed(0))

    class Instant:
        config, dtype, device, max_positions = model.config, model.dtype, model.device, model.max_positions

        def __call__(self, batch: Any, view: Any) -> torch.Tensor:  # noqa: ARG002 - a model's arguments
            return logits[: len(batch.logit_rows)]

    runner.model = Instant()
    return engine


def step_times(phase: str, sequences: int, new_tokens: int = STEPS) -> dict[str, float]:
    """Return the median milliseconds of each part, and of the whole, of a step in which all sequences decode."""
    engine = engine_without_passes(phase, sequences)
    watch = StepParts(engine)
    watch.start()
    for _ in range(sequences):
        add(engine, [1] * PROMPT_TOKENS, new_tokens)
    steps: list[dict[str, float]] = []
    while engine.has_work:
        started_s = engine.clock()
        outputs = engine.step()
        times = {"step": engine.clock() - started_s} | dict.fromkeys(PARTS.values(), 0.0)
        for part in watch.take():
            times[part.what] = times.get(part.what, 0.0) + part.ended_s - part.began_s
        if len(outputs) == engine.telemetry.current.decode_tokens == sequences:
            steps.append(times)
    return {part: statistics.median(step[part] for step in steps) * 1e3 for part in (*PARTS.values(), "step")}


def parts(phase: str = "7", sequences: tuple[int, ...] = (1, 16, 64, 256)) -> Iterator[MeasuredTable]:
    """Time the parts of a step for several numbers of sequences."""
    module = find_phase_module(phase)
    rows: list[list[Cell]] = [[count, *step_times(module, count).values()] for count in sequences]
    yield MeasuredTable(
        name="host_cost",
        title="a decode step on the host",
        setup={
            "phase": module,
            "model": f"{MODEL}, without its passes",
            "median of": f"{STEPS} steps",
        },
        columns=["sequences", *(f"{part}, ms" for part in (*PARTS, "step"))],
        rows=rows,
    )
