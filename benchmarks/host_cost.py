"""What a decode step costs on the host, part by part: everything but the model.

`python -m benchmarks.host_cost [--phase 7] [--sequences 1 16 64 256]`

The engine is a real one on the tiny zoo model, with real requests in it; only the forward pass is left out, and
answers with the same logits each time. So what is timed is Python and small tensors, the same for any model.

```text
scheduling   retire, release, make_room, admit, plan
metadata     the plan's passes, each pass's tokens, positions, block tables and lengths
sampling     logits to token ids
commit       ids to text, stop decisions and outputs
```
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import LOCAL
from benchmarks.servers import BLOCK_SIZE, find_phase_module
from benchmarks.tables import Cell, MeasuredTable
from common.engine import Engine
from common.phases import find_phase
from common.request import SamplingParams

MODEL = "zoo:llama-tiny"
PROMPT_TOKENS, STEPS = 16, 200
PARTS = ("scheduling", "metadata", "sampling", "commit")


class Stopwatch:
    """Seconds by part, of the step that runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def time(self, part: str, owner: Any, *methods: str) -> None:
        """From now on, count the time in these methods of `owner` as this part's."""
        for name in methods:
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - started_s

        return timed


def engine_without_passes(phase: str, sequences: int) -> Engine:
    """An engine whose forward passes take no time, with room for `sequences`."""
    package = find_phase(phase)
    whole_blocks = (
        -(-(PROMPT_TOKENS + STEPS) // BLOCK_SIZE) * BLOCK_SIZE
    )  # or the pool could not hold all of them
    engine = package.build_engine(
        package.Config(model=MODEL, max_batch_size=sequences, max_seq_len=whole_blocks)
    )
    runner: Any = engine.runner  # whose parts are about to be replaced
    logits = torch.randn(
        sequences, runner.model.config.vocab_size, generator=torch.Generator().manual_seed(0)
    )
    model = runner.model

    class Instant:
        config, dtype, device, max_positions = model.config, model.dtype, model.device, model.max_positions

        def __call__(self, batch: Any, view: Any) -> torch.Tensor:  # noqa: ARG002 - a model's arguments
            return logits[: len(batch.logit_rows)]

    runner.model = Instant()
    passes = runner.passes
    runner.passes = lambda plan: list(passes(plan))  # a generator would be timed before it has done anything
    return engine


def step_times(phase: str, sequences: int, params: SamplingParams) -> dict[str, float]:
    """Milliseconds of each part of a step in which all decode: medians."""
    engine = engine_without_passes(phase, sequences)
    watch = Stopwatch()
    watch.time("scheduling", engine.scheduler, "retire", "make_room", "admit", "plan")
    watch.time("scheduling", engine.runner, "release")
    watch.time("metadata", engine.runner, "passes", "prepare")
    watch.time("sampling", engine.runner, "_sample")
    watch.time("commit", engine.runner, "commit")
    for _ in range(sequences):
        engine.add_request(engine.create_request([1] * PROMPT_TOKENS, params))
    steps: list[dict[str, float]] = []
    while engine.has_work:
        watch.seconds.clear()
        started_s = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == engine.telemetry.current.decode_tokens == sequences:
            steps.append(watch.seconds | {"step": time.perf_counter() - started_s})
    return {part: statistics.median(step[part] for step in steps) * 1e3 for part in (*PARTS, "step")}


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--phase", default="7")
    options.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256])
    options.add_argument("--out", type=Path, default=LOCAL, help=f"folder for results ({LOCAL})")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    module = find_phase_module(options.phase)
    params = SamplingParams(temperature=0.0, max_new_tokens=STEPS, ignore_eos=True)
    rows: list[list[Cell]] = []
    for sequences in options.sequences:
        times = step_times(module, sequences, params)
        rows.append([sequences, *(times[part] for part in (*PARTS, "step"))])
    table = MeasuredTable(
        name="host_cost",
        title="a decode step on the host",
        setup={
            "phase": module,
            "model": f"{MODEL}, without its passes",
            "median of": f"{STEPS} steps",
            "threads": str(torch.get_num_threads()),
        },
        columns=["sequences", *(f"{part}, ms" for part in (*PARTS, "step"))],
        rows=rows,
    )
    table.publish(options.out)


if __name__ == "__main__":
    main()
