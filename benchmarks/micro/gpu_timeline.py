"""Steps of phase 9 over time: how long the host works, how long it waits, how long the device computes.

The host's margin is the share of its time in which it waits for the device. While the host waits, the device has
work. A trace of each kind of request is written beside the tables, for ui.perfetto.dev.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from benchmarks.micro import Dtype, say
from benchmarks.micro.on_device import DEVICE, Loaded, decode, prompts_of
from benchmarks.results import LOCAL
from benchmarks.tables import Cell, MeasuredTable
from common.constrained.grammar import Grammar
from common.engine.engine import Engine
from common.observing.step_parts import StepParts
from common.observing.trace import TraceFile, Tracer
from common.request import SamplingParams

PARTS = ("plan", "launch", "wait", "commit", "stream")
COLUMNS = ["requests", "step, ms", *(f"{part}, ms" for part in PARTS), "host's margin"]

#: Sampling parameters of each kind of request.
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.8, seed=1),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.1, seed=1),
    "grammar": SamplingParams(temperature=0.8, seed=1, grammar=Grammar.regex("[a-z ]{2000,}")),
}


def parts_ms(
    engine: Engine, prompts: list[list[int]], new_tokens: int, params: SamplingParams
) -> dict[str, float]:
    """Serve a batch. Returns means over all steps, prefill included, in milliseconds: the time of each host part in
    `PARTS`, and the time of the work on the device's stream (`stream`)."""
    watch = StepParts(engine)
    watch.start()
    before = engine.telemetry.counters.steps
    decode(engine, prompts, new_tokens, params=params)
    steps = engine.telemetry.counters.steps - before
    totals = dict.fromkeys(PARTS, 0.0)
    for part in watch.take():
        name = "stream" if part.lane == "stream" else part.what
        if name in totals:
            totals[name] += part.ended_s - part.began_s
    watch.stop()
    return {name: seconds / steps * 1e3 for name, seconds in totals.items()}


def steps(
    model: str = "dummy:llama-3.2-1b",
    sequences: tuple[int, ...] = (1, 16, 64),
    prompt_tokens: int = 32,
    new_tokens: int = 48,
    dtype: Dtype = "bfloat16",
    traces: str = str(LOCAL),
) -> Iterator[MeasuredTable]:
    """Time the parts of steps, and trace them.

    Args:
        sequences: numbers of sequences
        traces: folder for traces
    """
    folder, rows = Path(traces), list[list[Cell]]()
    folder.mkdir(parents=True, exist_ok=True)
    loaded = Loaded.of(model, dtype, prompt_tokens + new_tokens)
    most = max(sequences)
    engine = loaded.engine(
        "9", max_batch_size=most, max_waiting_requests=most, max_seq_len=prompt_tokens + new_tokens
    )
    for kind, params in KINDS.items():
        exact = dataclasses.replace(params, max_new_tokens=new_tokens, ignore_eos=True)
        for count in sequences:
            say(f"{kind}: {count} sequences")
            prompts = prompts_of(count, prompt_tokens, loaded.model.config.vocab_size)
            found = decode(engine, prompts, new_tokens, params=exact)
            parts = parts_ms(engine, prompts, new_tokens, exact)
            margin = parts["wait"] / sum(ms for part, ms in parts.items() if part != "stream")
            rows.append([f"{count}, {kind}", found.step_s * 1e3, *parts.values(), margin])
            yield MeasuredTable(
                name="gpu_timeline",
                title="parts of a step of phase 9",
                setup={"model": f"{model} in {dtype}, on {DEVICE}", "parts": "means over all steps"},
                columns=COLUMNS,
                rows=rows,
            )
        tracer, sink = Tracer(engine), TraceFile(folder / f"trace-{kind}.json")
        tracer.start(sink)
        decode(engine, prompts, new_tokens, params=exact)
        tracer.stop(sink)
