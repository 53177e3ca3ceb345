"""Measurements that answer one question each: `python -m benchmarks micro NAME`.

A measurement is a function that yields tables (`benchmarks.tables`). Its keyword arguments are its options: name,
type and default come from the signature, the help from the docstring's `Args`. Parsing, saving and printing are
done here for all measurements. A module is imported when its measurement is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import multiprocessing
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args, get_origin

import torch
from rich.console import Console

from benchmarks.results import LOCAL, TABLES
from benchmarks.tables import MeasuredTable

Key = TypeVar("Key")
Measurement = Callable[..., Iterable[MeasuredTable]]
Dtype = Literal["bfloat16", "float32"]
Quantize = Literal["none", "int8"]


class Entry(NamedTuple):
    """A measurement: the question that it answers, and its function, as `module.function` below this package."""

    says: str
    function: str


ENTRIES = {
    "batch_size": Entry("a decode step by the number of sequences, beside a roofline", "batch_size.steps"),
    "decode_step": Entry("one pass, ours and those of other libraries", "decode_step.passes"),
    "gpu_attention": Entry("attention on a GPU, ours and torch's", "gpu_attention.kernels"),
    "gpu_steps": Entry("decode steps of phases 5 to 10 on a GPU, beside a roofline", "gpu_steps.steps"),
    "half_precision": Entry("real models in bfloat16, beside float32", "half_precision.accuracy"),
    "int8_accuracy": Entry("real models with int8 weights, beside bfloat16", "int8.accuracy"),
    "int8_speed": Entry("products and passes with int8 weights, beside bfloat16", "int8.speed"),
    "kv_cache": Entry("the next token with a KV cache and without", "kv_cache.steps"),
    "offline": Entry("output tokens a second offline, by nano-vllm's benchmark", "offline.throughput"),
    "own_bits": Entry("passes with a GGUF file's own bits, beside llama.cpp", "own_bits.speed"),
    "pipeline": Entry("a decode step of phase 9 at each depth", "pipeline.depths"),
    "speculative": Entry("a token of phase 10 and of phase 9, by workload", "speculative.compare"),
    "tiered": Entry("phase 11 and phase 10: restarts, many chats, no repetition", "tiered.compare"),
}


def main(words: Sequence[str], console: Console) -> int:
    """Run the measurement that `words` name. Saves each table when it is yielded, and prints all tables at the end.

    If a measurement yields a table of the same name again, the new table replaces the old one: long measurements
    yield their table after each row. Returns the exit code.

    Raises:
        ValueError: there is no such measurement.
    """
    name, *rest = words or ["--help"]
    if name in ("-h", "--help"):
        usage = "usage: python -m benchmarks micro NAME [options]; micro NAME --help lists the options\n"
        lines = [f"  {known:<18}{entry.says}" for known, entry in ENTRIES.items()]
        console.print("\n".join([usage, *lines]), markup=False, highlight=False)
        return 0
    if name not in ENTRIES:
        raise ValueError(f"micro {name}: there are {', '.join(ENTRIES)}")
    measurement = find(name)
    given = vars(parser(name, measurement).parse_args(rest))
    out = given.pop("out")
    tables: dict[str, MeasuredTable] = {}
    for table in measurement(**given):
        if not any(word.startswith("threads") for word in table.setup):
            table.setup["threads"] = str(torch.get_num_threads())
        table.save(out)
        tables[table.name] = table
    for table in tables.values():
        table.print(console)
    console.print(f"written to {out / TABLES}: {', '.join(tables)}")
    return 0


def find(name: str) -> Measurement:
    module, _, function = ENTRIES[name].function.partition(".")
    found: Measurement = getattr(importlib.import_module(f"benchmarks.micro.{module}"), function)
    return found


def parser(name: str, measurement: Measurement) -> argparse.ArgumentParser:
    """Return a parser with an option for each keyword argument of a measurement."""
    module, text = inspect.getmodule(measurement), inspect.getdoc(measurement) or ""
    about, _, arguments = text.partition("Args:")
    helps = dict(re.findall(r"^ +(\w+): (.+)$", arguments, re.MULTILINE))
    command = argparse.ArgumentParser(
        prog=f"python -m benchmarks micro {name}",
        description=f"{about.strip()}\n\n{module.__doc__ if module is not None else ''}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for parameter in inspect.signature(measurement, eval_str=True).parameters.values():
        default = parameter.default
        several = isinstance(default, tuple)
        shown = " ".join(map(str, default)) if several else default
        command.add_argument(
            f"--{parameter.name.replace('_', '-')}",
            action="extend" if several else "store",
            default=argparse.SUPPRESS,  # without the option, the function uses its own default
            type=type(default[0] if several else default),
            nargs="+" if several else None,
            choices=get_args(parameter.annotation) if get_origin(parameter.annotation) is Literal else None,
            help=f"{helps.get(parameter.name, '')} ({shown})".strip(),
        )
    command.add_argument("--out", type=Path, default=LOCAL, help=f"folder for results ({LOCAL})")
    return command


# ---------------------------------------------------------------------- helpers of measurements


def say(progress: str) -> None:
    """Print a line of a measurement's progress."""
    Console().print(progress, highlight=False, markup=False)


@contextmanager
def processes(ways: Iterable[Key]) -> Iterator[dict[Key, ProcessPoolExecutor]]:
    """Context manager that yields a new process for each variant, so that its engine shares nothing with others."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        yield {way: stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for way in ways}


def in_turns(ways: Mapping[Key, Callable[[], float]], turns: int) -> dict[Key, float]:
    """Measure every variant once a turn, so that a machine that slows down slows all variants alike.

    Args:
        ways: for each variant the function that measures it, and returns the measured value.
        turns: number of turns that count. One more turn before them warms up.

    Returns:
        The median of each variant's values.
    """
    found: dict[Key, list[float]] = {key: [] for key in ways}
    for turn in range(turns + 1):
        for key, measure in ways.items():
            value = measure()
            if turn:
                found[key].append(value)
    return {key: statistics.median(values) for key, values in found.items()}
