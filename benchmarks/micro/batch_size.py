"""The time of a decode step by the number of sequences in it, beside the least that the machine allows.

Only the model runs, with one token of each sequence. Two lower bounds stand beside the time of each step (Williams
et al. 2009, *Roofline*): the time to read all weights, keys and values, and the time to do all multiplications. The
machine's bandwidth and arithmetic rate are measured in the same run.

```text
reading      weights once a step, keys and values of every row          bytes / bandwidth
arithmetic   two operations for every weight and row, and attention's   operations / rate
```
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.micro import Dtype, in_turns
from benchmarks.micro.passes import CONTEXT, Passes, load_as_served, milliseconds
from benchmarks.tables import Cell, MeasuredTable
from common.models.config import kv_bytes
from common.models.layers import CausalLM
from kernels.linear import pack_linear, packed_linear

COLUMNS = [
    "rows",
    "step, ms",
    "a row's share, ms",
    "tokens / s",
    "reading alone, ms",
    "arithmetic alone, ms",
    "step / larger bound",
]
READ_BYTES = 2**29  # far more than any cache holds
PEAK_ROWS, PEAK_SIZE = 512, 2048  # a product in which nearly all time is arithmetic


class Machine(NamedTuple):
    """The measured bandwidth and arithmetic rate of a device (of a CPU: with torch's number of threads)."""

    bytes_per_s: float
    operations_per_s: float


class Work(NamedTuple):
    """The bytes a decode step must read, and the operations it must do."""

    bytes: float
    operations: float

    def bounds_ms(self, machine: Machine) -> tuple[float, float]:
        """Return the milliseconds that reading alone takes, and those that arithmetic alone takes."""
        return self.bytes / machine.bytes_per_s * 1e3, self.operations / machine.operations_per_s * 1e3


def measure_machine(dtype: torch.dtype, repeats: int) -> Machine:
    """Measure the CPU's bandwidth by reading a large tensor, and its arithmetic rate by one large product. The
    fastest of several runs counts."""
    numbers = torch.ones(READ_BYTES // 4)
    reading_ms = min(milliseconds(numbers.sum, 1) for _ in range(repeats))
    x, weight = (torch.randn(size, PEAK_SIZE).to(dtype) for size in (PEAK_ROWS, PEAK_SIZE))
    packed = pack_linear(weight)

    def product() -> torch.Tensor:
        return F.linear(x, weight) if packed is None else packed_linear(x, packed, PEAK_SIZE)

    product_ms = min(milliseconds(product, 1) for _ in range(2 * repeats))
    return Machine(READ_BYTES / reading_ms * 1e3, 2 * PEAK_ROWS * PEAK_SIZE**2 / product_ms * 1e3)


def work_of(model: CausalLM, rows: int, context: int = CONTEXT) -> Work:
    """Count the work of a decode step of `rows` sequences. Each has `context` cached tokens and adds one."""
    config = model.config
    weights = sum(product.inputs * product.outputs for product in model.products())
    columns = rows * (context + 1)
    scores = 4 * columns * config.num_heads * config.head_dim * config.num_layers  # q·k, and weights·v
    return Work(
        bytes=weights * model.dtype.itemsize + kv_bytes(config, columns, model.dtype),
        operations=2 * weights * rows + scores,
    )


def measure(model: CausalLM, rows: Sequence[int], repeats: int, machine: Machine) -> list[list[Cell]]:
    """Time decode steps of each number of sequences in turns, and return a row of the table for each."""
    passes = Passes(model, rows)
    runs = {count: passes.plain(*passes.decode(count)) for count in rows}
    ways = {count: functools.partial(milliseconds, run, 10) for count, run in runs.items()}
    table: list[list[Cell]] = []
    for count, step in in_turns(ways, repeats).items():
        reading, arithmetic = work_of(model, count).bounds_ms(machine)
        share = step / max(reading, arithmetic)
        table.append([count, step, step / count, 1e3 * count / step, reading, arithmetic, share])
    return table


def steps(
    model: str = "dummy:llama-135m",
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
    repeats: int = 5,
    dtype: Dtype = "bfloat16",
) -> Iterator[MeasuredTable]:
    """Time a decode step of several numbers of sequences.

    Args:
        rows: numbers of sequences
    """
    loaded = load_as_served(model, getattr(torch, dtype), CONTEXT + 1)
    machine = measure_machine(loaded.dtype, repeats)
    yield MeasuredTable(
        name="batch_size",
        title="a decode step by the number of sequences in it",
        setup={
            "model": f"{model} in {dtype}",
            "context of each": f"{CONTEXT} tokens",
            "median of": f"{repeats} turns",
            "reads": f"{machine.bytes_per_s / 1e9:.3g} GB/s",
            "multiplies": f"{machine.operations_per_s / 1e9:,.0f} GFLOP/s",
        },
        columns=COLUMNS,
        rows=measure(loaded, rows, repeats, machine),
    )
