"""The paged decode kernel against other ways to the same attention, on a GPU.

`python -m benchmarks.attention_kernel [--contexts 256 1024 4096 16384] [--batches 1 8 32 128] [--out FOLDER]`

One layer's decode step: one query per sequence, keys and values in shuffled blocks. To read every visible key and
value once is the least that any of them can do, so each time is also given as a rate of those bytes, and as a share
of what this GPU's memory does in a plain copy, measured in the same run. The level-2 cache is emptied before every
repetition.

| contender | what it does |
| --- | --- |
| paged kernel | ours: walks the block table, copies nothing |
| gather + torch | ours, elsewhere than on CUDA: copies the visible columns, then plain products and softmax |
| gather + varlen_attn | copies the visible columns, then FlashAttention's varlen kernel |
| varlen_attn, paged | the same kernel on the block table itself; needs FlashAttention 3 |
| flex_attention | compiled, on columns that were copied beforehand: its time is without the gather |
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.results import LOCAL
from benchmarks.tables import Cell, MeasuredTable
from kernels.attention import attention, gathered_attention, varlen_attention
from kernels.attention_layout import AttentionLayout
from kernels.dispatch import HAS_TRITON

COPY_BYTES = 1 << 30  # enough to outweigh any cache
TOLERANCE = 0.05  # what contenders may differ by in half precision: anything larger is a wrong result

Attend = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """What is the same for all rows of the table."""

    heads: int
    heads_kv: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    window: int | None

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def visible(self, context: int) -> int:
        """Columns that the last query sees."""
        return context if self.window is None else min(context, self.window)

    def least_bytes(self, batch: int, context: int) -> int:
        """Every visible key and value once, every query and result once."""
        rows = 2 * self.visible(context) * self.heads_kv + 2 * self.heads
        return batch * rows * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Step:
    """One decode step: `batch` sequences of `context` columns."""

    shape: Shape
    q: Tensor  # [B, Hq, D]
    k_store: Tensor  # [blocks, block_size, Hkv, D]
    v_store: Tensor
    layout: AttentionLayout

    @classmethod
    def draw(cls, shape: Shape, batch: int, context: int, device: str) -> Step:
        generator = torch.Generator(device).manual_seed(0)
        width = -(-context // shape.block_size)
        store = (batch * width, shape.block_size, shape.heads_kv, shape.head_dim)
        q, k_store, v_store = (
            torch.randn(size, dtype=shape.dtype, device=device, generator=generator)
            for size in ((batch, shape.heads, shape.head_dim), store, store)
        )
        table = torch.randperm(batch * width, generator=torch.Generator().manual_seed(0)).view(batch, width)
        layout = AttentionLayout(
            table,
            torch.arange(batch),
            shape.block_size,
            (1,) * batch,
            (context,) * batch,
            shape.heads_kv,
            torch.device(device),
        )
        return cls(shape, q, k_store, v_store, layout)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the visible columns, [B, Hkv, columns, D]: these sequences are of one length."""
        shape, (group,) = self.shape, self.layout.decode_groups(self.shape.window)
        batch = self.q.shape[0]
        visible = shape.visible(self.layout.kv_lengths[0])
        k, v = (
            store.view(-1, shape.head_dim)[group.addresses]
            .view(shape.heads_kv, batch, group.width, shape.head_dim)
            .transpose(0, 1)[:, :, :visible]  # behind them, what fills the last tile
            for store in (self.k_store, self.v_store)
        )
        return k.contiguous(), v.contiguous()


def paged_kernel(step: Step) -> Attend:
    """What the engine calls: on CUDA, a decode step takes our kernel."""
    if not HAS_TRITON:
        raise NotImplementedError("Triton is not installed")
    shape, own = step.shape, step.layout.write_addresses
    k, v = (store.flatten(0, 1)[own] for store in (step.k_store, step.v_store))
    return lambda: attention(
        step.q, k, v, step.k_store, step.v_store, step.layout, scale=shape.scale, window=shape.window
    )


def gather_torch(step: Step) -> Attend:
    shape = step.shape
    return lambda: gathered_attention(
        step.q, step.k_store, step.v_store, step.layout, scale=shape.scale, window=shape.window
    )


def gather_varlen(step: Step) -> Attend:
    shape = step.shape
    return lambda: varlen_attention(
        step.q, step.k_store, step.v_store, step.layout, scale=shape.scale, window=shape.window
    )


def paged_varlen(step: Step) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    shape, layout = step.shape, step.layout
    indices, paged = layout.varlen(None), layout.paged
    table = paged.block_table.to(torch.int32)

    def attend() -> Tensor:
        out = varlen_attn(
            step.q,
            step.k_store,
            step.v_store,
            indices.query_offsets,
            indices.kv_offsets,
            1,
            paged.max_length,
            scale=shape.scale,
            window_size=(-1 if shape.window is None else shape.window - 1, 0),
            enable_gqa=shape.heads != shape.heads_kv,
            seqused_k=paged.lengths,
            block_table=table,
        )
        assert isinstance(out, Tensor)
        return out

    return attend


def flex(step: Step) -> Attend:
    from torch.nn.attention.flex_attention import flex_attention

    shape = step.shape
    k, v = step.gathered()
    q = step.q.unsqueeze(2)  # [B, Hq, 1, D]: the last column's query, which sees all columns there are
    torch.compiler.reset()  # or the ninth shape would run uncompiled, without a word
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend() -> Tensor:
        out: Tensor = compiled(q, k, v, scale=shape.scale, enable_gqa=shape.heads != shape.heads_kv)
        return out.squeeze(2)

    return attend


CONTENDERS: dict[str, Callable[[Step], Attend]] = {
    "paged kernel": paged_kernel,
    "gather + torch": gather_torch,
    "gather + varlen_attn": gather_varlen,
    "varlen_attn, paged": paged_varlen,
    "flex_attention": flex,
}


def time_on_gpu(function: Callable[[], object]) -> float:
    """Seconds of one call on the device: the median of many, each with an empty level-2 cache."""
    from triton.testing import do_bench

    milliseconds: float = do_bench(function, warmup=50, rep=200, return_mode="median")
    return milliseconds / 1e3


Timer = Callable[[Callable[[], object]], float]


def copy_bytes_per_s(device: str, timer: Timer, size: int = COPY_BYTES) -> float:
    """What the memory does when a large tensor is copied: bytes read and written, per second."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timer(lambda: target.copy_(source))


def measure(
    shape: Shape, batch: int, context: int, copy_rate: float, device: str, timer: Timer
) -> list[dict[str, Any]]:
    """A row for each contender; where one does not run or is wrong, `reason` says why and there is no time."""
    rows: list[dict[str, Any]] = []
    try:
        step = Step.draw(shape, batch, context, device)
    except torch.OutOfMemoryError:
        return [_row(name, batch, context, reason="not enough memory for the store") for name in CONTENDERS]
    expected: Tensor | None = None
    for name, build in CONTENDERS.items():
        try:
            attend = build(step)
            result = attend()
            difference = None if expected is None else (result - expected).abs().max().item()
            # The first is what the others are held against; it is itself held to an oracle by the tests.
            expected = result if expected is None else expected
            if difference is not None and not difference < TOLERANCE:
                rows.append(_row(name, batch, context, reason=f"wrong by {difference:.3g}"))
                continue
            seconds = timer(attend)
        except torch.OutOfMemoryError:
            rows.append(_row(name, batch, context, reason="not enough memory"))
        except Exception as error:  # what a build of torch lacks, it says in many ways
            rows.append(_row(name, batch, context, reason=f"{type(error).__name__}: {str(error)[:200]}"))
        else:
            rate = shape.least_bytes(batch, context) / seconds
            rows.append(
                _row(
                    name,
                    batch,
                    context,
                    seconds=seconds,
                    bytes_per_s=rate,
                    share_of_copy=rate / copy_rate,
                    difference=difference,
                )
            )
    return rows


def _row(contender: str, batch: int, context: int, **values: Any) -> dict[str, Any]:
    """Seconds, bytes per second and share are None where there is a reason."""
    blank = dict.fromkeys(("seconds", "bytes_per_s", "share_of_copy", "difference", "reason"))
    return {"contender": contender, "batch": batch, "context": context, **blank, **values}


def print_table(rows: list[dict[str, Any]], shape: Shape, console: Console) -> None:
    """Microseconds, and below 1 the share of a plain copy's bandwidth."""
    table = Table(
        "batch", "context", *CONTENDERS, title=f"one decode step, µs (share of a copy's bandwidth); {shape}"
    )
    cells: dict[tuple[int, int], list[str]] = {}
    for row in rows:
        cell = (
            f"{row['seconds'] * 1e6:.0f} ({row['share_of_copy']:.0%})"
            if row["reason"] is None
            else row["reason"].partition(":")[0]
        )
        cells.setdefault((row["batch"], row["context"]), []).append(cell)
    for (batch, context), texts in cells.items():
        table.add_row(str(batch), str(context), *texts)
    console.print(table)


def as_table(rows: list[dict[str, Any]], shape: Shape, copy_rate: float) -> MeasuredTable:
    """Everything measured, a line for each contender."""
    window = "none" if shape.window is None else str(shape.window)
    cells: list[list[Cell]] = [
        [
            row["batch"],
            row["context"],
            row["contender"],
            None if row["seconds"] is None else row["seconds"] * 1e6,
            None if row["bytes_per_s"] is None else row["bytes_per_s"] / 1e9,
            row["share_of_copy"],
            row["difference"],
            row["reason"] or "",
        ]
        for row in rows
    ]
    return MeasuredTable(
        name="attention_kernel",
        title="attention of one decode step",
        setup={
            "heads": f"{shape.heads} over {shape.heads_kv} of keys and values",
            "head_dim": str(shape.head_dim),
            "block size": str(shape.block_size),
            "window": window,
            "in": str(shape.dtype).removeprefix("torch."),
            "a copy moves": f"{copy_rate / 1e9:.0f} GB/s",
        },
        columns=[
            "batch",
            "context",
            "attention",
            "µs",
            "GB/s",
            "share of a copy",
            "difference",
            "not measured",
        ],
        rows=cells,
    )


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    options.add_argument("--heads", type=int, default=32, help="query heads (32)")
    options.add_argument("--kv-heads", type=int, default=8, help="KV heads (8)")
    options.add_argument("--head-dim", type=int, default=128)
    options.add_argument("--block-size", type=int, default=16)
    options.add_argument("--window", type=int, help="sliding window in columns (none)")
    options.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    options.add_argument("--out", type=Path, default=LOCAL, help=f"folder for results ({LOCAL})")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("error: this measures a GPU kernel, and torch finds no CUDA device here")
    if not HAS_TRITON:
        sys.exit("error: this measures a Triton kernel, and Triton is not installed")
    shape = Shape(
        heads=options.heads,
        heads_kv=options.kv_heads,
        head_dim=options.head_dim,
        block_size=options.block_size,
        dtype=getattr(torch, options.dtype),
        window=options.window,
    )
    device = "cuda"
    console = Console()
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        copy_rate = copy_bytes_per_s(device, time_on_gpu)
        console.print(f"{torch.cuda.get_device_name()}: a copy moves {copy_rate / 1e9:.0f} GB/s")
        for context in options.contexts:
            for batch in options.batches:
                rows += measure(shape, batch, context, copy_rate, device, time_on_gpu)
                console.print(f"batch {batch}, context {context} done")
                torch.cuda.empty_cache()
    print_table(rows, shape, console)
    path = as_table(rows, shape, copy_rate).save(options.out)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
