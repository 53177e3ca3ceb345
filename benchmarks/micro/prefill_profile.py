"""The time of a prompt's pass, operator by operator.

The prompts of `decode_step` run under torch's profiler, each batch in one pass. The profiler adds microseconds to
each operator, so the sum is more than a pass takes without it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

from torch.profiler import ProfilerActivity, profile

from benchmarks.micro.decode_step import LONG, MANY, MAX_SEQ_LEN, SEQUENCES, Batch, prompts
from benchmarks.micro.engines import add, build_engine
from benchmarks.tables import Cell, MeasuredTable
from common.engine.engine import Engine

#: The row of the table to which each operator's time is added. All other operators are added to `REST`.
PARTS = {
    "infer::gated_linear": "gate and up, activated",
    "infer::linear": "other products",
    "infer::attention": "attention",
    "infer::fused_add_rms_norm": "norms",
    "infer::rms_norm": "norms",
    "infer::rope": "rope",
}
REST = "all else"


def parts_ms(engine: Engine, batch: Batch, turn: int) -> dict[str, float]:
    """Profile an engine while it computes the prompts of a batch and generates one token after each. Return the
    milliseconds of each part (a value of `PARTS`, or `REST`)."""
    for prompt in prompts(batch, turn, engine.runner.model.config.vocab_size):
        add(engine, prompt, 1)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        while engine.has_work:
            engine.step()
    found: dict[str, float] = defaultdict(float)
    for each in profiled.key_averages():
        found[PARTS.get(each.key, REST)] += each.self_cpu_time_total / 1e3
    return found


def parts(
    model: str = "dummy:llama-135m", phase: str = "phase8_prefix", repeats: int = 5
) -> Iterator[MeasuredTable]:
    """Profile the pass of many short prompts, and of a long one.

    Args:
        phase: a phase that calls its passes from Python and does not play recordings of them
    """
    longest = LONG.prompt_tokens
    engine = build_engine(
        phase,
        model=model,
        device="cpu",
        max_batch_size=SEQUENCES,
        max_seq_len=MAX_SEQ_LEN,
        prefill_chunk_size=longest,
    )
    rows: list[list[Cell]] = []
    for batch in (MANY, LONG):
        turns = [parts_ms(engine, batch, turn) for turn in range(repeats + 1)][1:]
        medians = {
            part: statistics.median(turn.get(part, 0.0) for turn in turns)
            for part in [*dict.fromkeys(PARTS.values()), REST]
        }
        whole = sum(medians.values())
        name = f"{batch.sequences} × {batch.prompt_tokens}"
        rows += [[name, part, ms, 100 * ms / whole] for part, ms in medians.items()]
    yield MeasuredTable(
        name="prefill_profile",
        title="where a prompt's time goes",
        setup={"model": model, "pass": f"{longest} tokens"},
        columns=["prompts", "part", "ms", "%"],
        rows=rows,
    )
