"""A file's own bits beside dequantized weights, int8 weights, and llama.cpp on the same file.

All passes take turns in one run. Recordings of our passes are played (`kernels.tape`). llama.cpp runs in a process
of its own, in an environment that has `llama-cpp-python`. The weights are read once in each turn, for comparison.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.micro import in_turns, say
from benchmarks.micro.int8 import reading
from benchmarks.micro.passes import CONTEXT, Passes, milliseconds
from benchmarks.peers.random_gguf import random_gguf
from benchmarks.tables import Cell, MeasuredTable
from common.devices.resolve import resolve_dtype
from common.errors import StartupError
from common.models.gguf.checkpoint import GGUFCheckpoint
from common.models.presets import PRESETS
from common.models.registry import load_model, open_checkpoint
from kernels.native import has_products, load_native_kernels

SEQUENCES = (1, 4, 16)
PROMPT = 1024
PEER = Path(__file__).parents[1] / "peers" / "llama_passes.py"

#: Each column of the table: what is measured, and with how many sequences or tokens.
COLUMNS = {f"step of {n}, ms": ("step", n) for n in SEQUENCES} | {
    f"prompt of {PROMPT}, ms": ("prompt", PROMPT)
}

Measure = Callable[[str, int], float]


class LlamaCpp:
    """llama.cpp in a process of its own. `python` is the interpreter of an environment that has it."""

    def __init__(self, python: str, file: Path) -> None:
        sizes = map(str, (torch.get_num_threads(), max(SEQUENCES), PROMPT))
        self.process = subprocess.Popen(
            [python, str(PEER), str(file), *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(f"llama.cpp ended with exit code {self.process.wait()}")
        return line

    def __call__(self, kind: str, count: int) -> float:
        """Return the milliseconds of a step of `count` sequences, or of a prompt of `count` tokens."""
        assert self.process.stdin is not None
        print(kind, count, file=self.process.stdin, flush=True)
        return float(self._answer())


def ours(checkpoint: GGUFCheckpoint, way: str) -> tuple[Measure, int]:
    """Load a file's weights. Returns a function that measures passes, and the bytes of the weights."""
    cpu = torch.device("cpu")
    dtype = resolve_dtype("auto", checkpoint.config.dtype, cpu)
    model = load_model(
        checkpoint,
        device=cpu,
        dtype=dtype,
        max_positions=PROMPT,
        keep_groups=way == "own bits" and has_products(dtype),
    )
    if way == "int8":
        model.quantize()
    model.pack()
    passes = Passes(model, SEQUENCES, PROMPT)
    runs = {("step", count): passes.taped(*passes.decode(count)) for count in SEQUENCES}
    runs["prompt", PROMPT] = passes.taped(*passes.prompt())
    layers = [layer.weight if layer.packed is None else layer.packed for layer in model.linear_layers()]
    return lambda kind, count: milliseconds(runs[kind, count], 10 if kind == "step" else 1), sum(
        each.nbytes for each in layers
    )


def speed(
    models: tuple[str, ...] = ("smollm2", "gemma3-270m", "qwen3-0.6b"),
    ways: tuple[str, ...] = ("own bits", "none", "int8"),
    llama: str = "",
    repeats: int = 3,
) -> Iterator[MeasuredTable]:
    """Time passes with a file's own bits.

    Args:
        models: GGUF files, models that `infer fetch` knows, or presets: their files have random weights
        ways: how our weights are held
        llama: the Python of an environment that has llama-cpp-python
    """
    if not load_native_kernels():
        raise ValueError("there are no native kernels here to measure")
    rows: list[list[Cell]] = []
    for name in models:
        checkpoint = open_checkpoint(str(random_gguf(name)) if name in PRESETS else name)
        if not isinstance(checkpoint, GGUFCheckpoint):
            raise StartupError(f"{name} is no GGUF file")
        say(f"{name}: {checkpoint.quantization}")
        measured: dict[str, Measure] = {}
        sizes: dict[str, int | None] = {}
        for way in ways:
            measured[way], sizes[way] = ours(checkpoint, way)
        peer = LlamaCpp(llama, checkpoint.file.path) if llama else None
        if peer is not None:
            measured["llama.cpp"], sizes["llama.cpp"] = peer, None
        turns: dict[tuple[str, str], Callable[[], float]] = {("read", ""): reading()}
        for column, work in COLUMNS.items():
            turns |= {(way, column): functools.partial(each, *work) for way, each in measured.items()}
        found = in_turns(turns, repeats)
        if peer is not None:
            peer.process.communicate()
        for way, size in sizes.items():
            read = None if size is None else size / 2**30 * found["read", ""]
            mb = None if size is None else size / 1e6
            rows.append([name, way, mb, read, *(found[way, column] for column in COLUMNS)])
            say(f"{rows[-1]}")
        yield MeasuredTable(
            name="own_bits",
            title="passes with a file's own bits",
            setup={"context of a decoded token": f"{CONTEXT} tokens", "median of": f"{repeats} turns"},
            columns=["model", "weights", "MB", "reading them once, ms", *COLUMNS],
            rows=rows,
        )
