"""The way to a fast CPU step, one stage at a time: what each kernel brings, on the same weights in one run.

`python -m benchmarks.cpu_steps [--model dummy:llama-135m] [--batch 1 16] [--repeats 5]`

A decode step and a prompt through the model alone, with torch's operations first, then with one native kernel more
in each row; last the whole pass played from a tape, so that Python is not on the way from operator to operator. All
stages take turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.results import LOCAL
from benchmarks.tables import Cell, MeasuredTable
from common.generate import ContiguousCache
from common.kv import KVShape, KVView, Span
from common.models.layers import CausalLM, TokenBatch
from common.models.registry import load_model, open_checkpoint
from common.request import Request, SamplingParams
from kernels.native import load_native_kernels
from kernels.tape import record

CONTEXT = 128  # columns before a decoded token; a prompt's length
PROMPT = 512

Run = Callable[[], object]

#: Each stage's name, and which modules choose their native kernel in it and in all stages after it.
STAGES: list[tuple[str, tuple[str, ...]]] = [
    ("torch's operations", ()),
    ("packed weights, activation at a product's end", ("linear", "gated_act")),
    ("attention", ("attention",)),
    ("norms and rope", ("rms_norm", "rope")),
]
TAPE = "played from a tape"
_CHOICE = {"linear": "has_native_products", "attention": "has_native_products"}  # others: use_native


@contextmanager
def only(modules: Sequence[str]) -> Iterator[None]:
    """Native kernels in these modules of `kernels`, torch's operations in all others."""
    with ExitStack() as stack:
        for _, names in STAGES:
            for name in set(names) - set(modules):
                choice = f"kernels.{name}.{_CHOICE.get(name, 'use_native')}"
                stack.enter_context(patch(choice, return_value=False))
        yield


class Passes:
    """One model, and the passes that are timed through it."""

    def __init__(self, model: CausalLM, batch: Sequence[int]) -> None:
        self.model = model
        shape = KVShape.of(model.config, model.dtype)
        self.cache = ContiguousCache(shape, model.device, max(CONTEXT + 1, PROMPT), max(batch))
        for i in range(max(batch)):
            self.cache.reserve(Request(f"{i}", [0], SamplingParams()), CONTEXT + 1)
        self.cache.advance(Span.exact(slot, 0, CONTEXT) for slot in range(max(batch)))

    def decode(self, count: int) -> tuple[TokenBatch, KVView]:
        return self._batch([Span.exact(slot, CONTEXT, CONTEXT + 1) for slot in range(count)])

    def prompt(self) -> tuple[TokenBatch, KVView]:
        return self._batch([Span.exact(0, 0, PROMPT)])

    def _batch(self, spans: Sequence[Span]) -> tuple[TokenBatch, KVView]:
        view = self.cache.view(spans)
        tokens = len(view.positions)
        token_ids = torch.arange(tokens) % self.model.config.vocab_size
        last = view.layout.host.query_offsets[1:] - 1
        return TokenBatch(token_ids, view.positions, last), view

    def plain(self, batch: TokenBatch, view: KVView) -> Run:
        return lambda: self.model(batch, view)

    def taped(self, batch: TokenBatch, view: KVView) -> Run:
        """The same pass from a tape. Its indices are the tape's own: it is timed on these inputs alone."""
        tape, _ = record(
            lambda ids, positions: (self.model(TokenBatch(ids, positions, batch.logit_rows), view),),
            batch.token_ids,
            batch.positions,
        )
        return lambda: tape(batch.token_ids, batch.positions)


def milliseconds(run: Run, times: int) -> float:
    """The median of a few."""
    taken = []
    for _ in range(times):
        started_s = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started_s)
    return statistics.median(taken) * 1e3


def measure(name: str, batch: Sequence[int], repeats: int, dtype: torch.dtype) -> list[list[Cell]]:
    """A row for each stage: decode steps by batch, then the prompt; milliseconds, the median of all turns."""

    def load() -> CausalLM:
        checkpoint = open_checkpoint(name)
        positions = max(CONTEXT + 1, PROMPT)
        return load_model(checkpoint, device=torch.device("cpu"), dtype=dtype, max_positions=positions)

    unpacked, packed = load(), load()
    packed.pack()
    stages: list[tuple[str, list[str], list[tuple[Run, int]]]] = []
    chosen: list[str] = []
    for stage, added in STAGES:
        chosen = [*chosen, *added]
        passes = Passes(packed if "linear" in chosen else unpacked, batch)
        runs = [(passes.plain(*passes.decode(count)), 20) for count in batch]
        stages.append((stage, chosen, [*runs, (passes.plain(*passes.prompt()), 3)]))
    taped = [(passes.taped(*passes.decode(count)), 20) for count in batch]
    stages.append((TAPE, chosen, [*taped, (passes.taped(*passes.prompt()), 3)]))

    found: list[list[list[float]]] = [[[] for _ in runs] for _, _, runs in stages]
    for turn in range(repeats + 1):
        for place, (_, modules, runs) in enumerate(stages):
            with only(modules):
                for column, (run, times) in enumerate(runs):
                    taken = milliseconds(run, times)
                    if turn:  # the first turn warms up
                        found[place][column].append(taken)
    return [
        [stage, *(statistics.median(times) for times in columns)]
        for (stage, _, _), columns in zip(stages, found, strict=True)
    ]


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", default="dummy:llama-135m", help="a dummy preset")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options.add_argument("--out", type=Path, default=LOCAL, help=f"folder for results ({LOCAL})")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if not load_native_kernels():
        raise SystemExit("there are no native kernels here to measure")
    rows = measure(options.model, options.batch, options.repeats, getattr(torch, options.dtype))
    table = MeasuredTable(
        name="cpu_steps",
        title="a pass through the model, one stage after the other",
        setup={
            "model": f"{options.model} in {options.dtype}",
            "context of a decoded token": f"{CONTEXT} tokens",
            "median of": f"{options.repeats} turns",
            "threads": str(torch.get_num_threads()),
        },
        columns=[
            "with",
            *(f"decode, {count} sequence{'s' if count > 1 else ''}, ms" for count in options.batch),
            f"a prompt of {PROMPT}, ms",
        ],
        rows=rows,
    )
    table.publish(options.out)


if __name__ == "__main__":
    main()
