"""Decode steps of phases 5 to 10 by the number of sequences, beside the least time that the device allows.

All engines share one model. The time is that of `Engine.step` while all sequences decode, text and stop decisions
included.

```text
eager       kernels are launched from Python, one by one
captured    a decode step is one graph
pipelined   a decode step is one graph, and the next one is launched before its tokens are read
one guess   pipelined, and a sequence whose text repeats itself gets a guess, which is verified
```
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.micro import Dtype, say
from benchmarks.micro.batch_size import work_of
from benchmarks.micro.on_device import Loaded, decode, describe, free_unused, measure_machine, prompts_of
from benchmarks.tables import MeasuredTable
from common.devices.streams import CudaStream
from common.engine.engine import Engine

COLUMNS = ["way", "sequences", "step, ms", "slowest, ms", "tokens / s", "share of the roofline"]

#: Each way to run decode steps, the most important first: the phase and its options.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "9 pipelined": ("9", {}),
    "9 captured": ("9", {"pipeline_depth": 0}),
    "9 eager": ("9", {"pipeline_depth": 0, "captured_steps": False}),
    "10 one guess": ("10", {"draft_length": 1}),
    "8 eager": ("8", {}),
    "7 eager": ("7", {}),
    "6 eager": ("6", {}),
    "5 eager": ("5", {}),
}


def failed_captures(engine: Engine) -> list[str]:
    """Return the passes that an engine calls kernel by kernel, because no graph of them could be captured."""
    stream = getattr(engine.runner, "stream", None)  # phases before 9 have none
    failed = stream.graphs.failed if isinstance(stream, CudaStream) else set()
    return sorted(f"{rows} rows of {key}" for key, rows in failed)


def steps(
    model: str = "dummy:llama-3.2-1b",
    sequences: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    prompt_tokens: int = 32,
    new_tokens: int = 32,
    dtype: Dtype = "bfloat16",
) -> Iterator[MeasuredTable]:
    """Time decode steps.

    Args:
        sequences: numbers of sequences
        new_tokens: tokens that each sequence generates; at least 16
    """
    length = prompt_tokens + new_tokens
    loaded = Loaded.of(model, dtype, length)
    machine = measure_machine(loaded.model.dtype)
    table = MeasuredTable(
        name=f"gpu_steps_{model.partition(':')[2]}",
        title=f"decode steps of {model}",
        setup={"model": f"{model} in {dtype}", "context": f"{prompt_tokens} tokens", **describe(machine)},
        columns=COLUMNS,
        rows=[],
    )
    most = max(sequences)
    for way, (phase, options) in WAYS.items():
        say(f"phase {way}")
        blocks = most * -(-length // 16)
        settings = {"max_batch_size": most, "max_waiting_requests": most, "max_seq_len": length} | options
        engine = loaded.engine(
            phase, num_blocks=blocks, enable_prefix_caching=False, prefill_chunk_size=2048, **settings
        )
        for count in sequences:
            found = decode(
                engine, prompts_of(count, prompt_tokens, loaded.model.config.vocab_size), new_tokens
            )
            bound_ms = max(work_of(loaded.model, count, prompt_tokens + new_tokens // 2).bounds_ms(machine))
            # The share counts tokens, not steps: a step of phase 10 may give a sequence several tokens.
            share = found.tokens_per_s * bound_ms / 1e3 / count
            step_ms, slowest_ms = found.step_s * 1e3, max(found.seconds) * 1e3
            table.rows.append([way, count, step_ms, slowest_ms, found.tokens_per_s, share])
            yield table
        if failed := failed_captures(engine):
            say(f"phase {way}: graphs that could not be captured: {failed}")
        del engine
        free_unused()
