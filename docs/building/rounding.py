"""How floating-point sums depend on their order, computed when the site is built."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.linear import pack_linear, packed_linear
from kernels.native import load_native_kernels

INPUTS, OUTPUTS, ROWS = 1536, 576, 64  # the longest sums of a model of 135 million parameters


def three_numbers() -> str:
    """One sum of three float32 numbers, bracketed in two ways."""
    a, b, c = (torch.tensor(number) for number in (1.0, 2.0**-24, 2.0**-24))
    rows = [("(a + b) + c", (a + b) + c), ("a + (b + c)", a + (b + c))]
    lines = [f"| {sum_} | {value.item():.9f} |" for sum_, value in rows]
    return "\n".join(["| a = 1, b = c = 2⁻²⁴, in float32 | sum |", "| --- | ---: |", *lines]) + "\n"


def orders_of_a_sum() -> str:
    """The same 1,536 float32 numbers, added in several orders."""
    numbers = torch.randn(INPUTS, generator=torch.Generator().manual_seed(0))
    orders = {
        "one after the other": in_order(numbers),
        "the first half, the second half, then both": in_order(
            torch.stack([in_order(half) for half in numbers.chunk(2)])
        ),
        "sixteen running sums, then those": in_order(
            torch.stack([in_order(numbers[lane::16]) for lane in range(16)])
        ),
        "exactly, rounded once": numbers.double().sum().float(),
    }
    lines = [f"| {order} | {value.item():.7f} |" for order, value in orders.items()]
    return "\n".join([f"| {INPUTS} numbers in float32 | sum |", "| --- | ---: |", *lines]) + "\n"


def in_order(numbers: torch.Tensor) -> torch.Tensor:
    """[K] -> their sum, one addition after the other."""
    total = torch.zeros(())
    for number in numbers:
        total = total + number
    return total


def lone_rows() -> str:
    """A linear layer's rows one at a time against all of them at once: how many outputs differ."""
    load_native_kernels()
    lines = [f"| {ROWS} rows, {INPUTS} inputs, {OUTPUTS} outputs | torch | here |", "| --- | ---: | ---: |"]
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        weight, x = (torch.randn(rows, INPUTS, generator=generator).to(dtype) for rows in (OUTPUTS, ROWS))
        found = [F.linear(x, weight) != torch.cat([F.linear(row, weight) for row in x.split(1)])]
        packed = pack_linear(weight)
        if packed is not None:
            alone = torch.cat([packed_linear(row, packed, OUTPUTS) for row in x.split(1)])
            found.append(packed_linear(x, packed, OUTPUTS) != alone)
        cells = [f"{int(differs.sum()):,} of {differs.numel():,}" for differs in found]
        cells += ["not computed"] * (2 - len(cells))
        lines.append(f"| {str(dtype).removeprefix('torch.')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
