"""The gain of each native CPU kernel: the same pass with one kernel more in each row, in one run.

A decode step and a prompt through the model alone, with torch's operations first, then with one native kernel more
in each row; last the whole pass played from a tape, so that Python is not on the way from operator to operator. All
stages take turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from benchmarks.micro import Dtype
from benchmarks.micro.passes import CONTEXT, PROMPT, Passes, Run, load_unpacked, milliseconds
from benchmarks.tables import Cell, MeasuredTable
from kernels.native import load_native_kernels

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
    """Context manager: native kernels in these modules of `kernels`, torch's operations in all others."""
    with ExitStack() as stack:
        for _, names in STAGES:
            for name in set(names) - set(modules):
                choice = f"kernels.{name}.{_CHOICE.get(name, 'use_native')}"
                stack.enter_context(patch(choice, return_value=False))
        yield


def measure(name: str, batch: Sequence[int], repeats: int, dtype: torch.dtype) -> list[list[Cell]]:
    """Return a row for each stage: median milliseconds of decode steps by batch, then of the prompt."""
    unpacked, packed = (load_unpacked(name, dtype, max(CONTEXT + 1, PROMPT)) for _ in range(2))
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


def stages(
    model: str = "dummy:llama-135m",
    batch: tuple[int, ...] = (1, 16),
    repeats: int = 5,
    dtype: Dtype = "bfloat16",
) -> Iterator[MeasuredTable]:
    """Time decode steps and a prompt, stage by stage.

    Args:
        model: a dummy preset
        batch: sequences of a decode step

    Raises:
        ValueError: there are no native kernels here.
    """
    if not load_native_kernels():
        raise ValueError("there are no native kernels here to measure")
    yield MeasuredTable(
        name="cpu_steps",
        title="a pass through the model, one stage after the other",
        setup={
            "model": f"{model} in {dtype}",
            "context of a decoded token": f"{CONTEXT} tokens",
            "median of": f"{repeats} turns",
        },
        columns=[
            "with",
            *(f"decode, {count} sequence{'s' if count > 1 else ''}, ms" for count in batch),
            f"a prompt of {PROMPT}, ms",
        ],
        rows=measure(model, batch, repeats, getattr(torch, dtype)),
    )
