"""The gain of each native CPU kernel. Each row of the table times the same pass with more native kernels.

Only the model runs, on a decode step and on a prompt. The first row uses torch's operations, and each further row
adds native kernels. In the last row a recording of the pass is played (`kernels.tape`), so that no Python runs
between operators. All rows are measured in turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from benchmarks.micro import Dtype, in_turns
from benchmarks.micro.passes import CONTEXT, PROMPT, Passes, Run, load_unpacked, milliseconds
from benchmarks.tables import Cell, MeasuredTable
from kernels.native import load_native_kernels

#: Each stage is a row of the table: its name, and the modules of `kernels` that use native kernels from
#: that row on.
STAGES: list[tuple[str, tuple[str, ...]]] = [
    ("torch's operations", ()),
    ("packed weights, activation at a product's end", ("linear", "gated_act")),
    ("attention", ("attention",)),
    ("norms and rope", ("rms_norm", "rope")),
]
TAPE = "played from a tape"
#: The function by which a module of `kernels` chooses its kernel. In all other modules it is `use_native`.
_CHOICE = {"linear": "has_native_products", "attention": "has_native_products"}


@contextmanager
def only(modules: Sequence[str]) -> Iterator[None]:
    """Context manager: among the modules of `kernels` in `STAGES`, only these use native kernels."""
    with ExitStack() as stack:
        for _, names in STAGES:
            for name in set(names) - set(modules):
                choice = f"kernels.{name}.{_CHOICE.get(name, 'use_native')}"
                stack.enter_context(patch(choice, return_value=False))
        yield


def measure(name: str, batch: Sequence[int], repeats: int, dtype: torch.dtype) -> list[list[Cell]]:
    """Return a row for each stage and for the recording: median milliseconds of decode steps by batch, then of the
    prompt."""
    unpacked, packed = (load_unpacked(name, dtype, max(CONTEXT + 1, PROMPT)) for _ in range(2))
    packed.pack()
    ways: dict[tuple[str, int], Callable[[], float]] = {}

    def add(stage: str, modules: Sequence[str], passes: Passes, run: Callable[..., Run]) -> None:
        inputs = [*((passes.decode(count), 20) for count in batch), (passes.prompt(), 3)]
        for column, ((tokens, view), times) in enumerate(inputs):
            ways[stage, column] = functools.partial(timed, modules, run(tokens, view), times)

    chosen: list[str] = []
    for stage, added in STAGES:
        chosen = [*chosen, *added]
        passes = Passes(packed if "linear" in chosen else unpacked, batch)
        add(stage, chosen, passes, passes.plain)
    add(TAPE, chosen, passes, passes.taped)
    found = in_turns(ways, repeats)
    columns = range(len(batch) + 1)
    return [[stage, *(found[stage, column] for column in columns)] for stage in (*dict(STAGES), TAPE)]


def timed(modules: Sequence[str], run: Run, times: int) -> float:
    with only(modules):
        return milliseconds(run, times)


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
