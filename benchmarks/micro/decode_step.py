"""One pass of our engine against one pass of other libraries, on the same weights, each in a process of its own.

Each library continues a batch of prompts, greedily. Prefill is the time until every sequence has its first token. A
decode step is the mean time of the steps that give every sequence one more token. All processes have the weights
loaded, and take turns, so that a machine that slows down slows all. Every turn has new prompts, which no cache
holds. No sequence decodes while a prompt is computed, so all libraries may compute 2048 prompt tokens at once.
Smaller chunks would only shorten the gaps between tokens of other sequences.

A lower bound of a decode step is measured in the same turns: the time to read every weight once.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from benchmarks.micro import Dtype, Quantize, say
from benchmarks.micro.passes import milliseconds
from benchmarks.peers.environments import LIBRARIES, Environment, find_environment
from benchmarks.peers.process import WorkerProcess
from benchmarks.peers.weights import Weights, converted, weights_of
from benchmarks.peers.workers.protocol import Options, Timing
from benchmarks.tables import Cell, MeasuredTable
from common.errors import StartupError
from common.models.registry import weight_bytes
from common.startup.phases import phase_names

NEW_TOKENS = 40
PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 2048
SEQUENCES = 16
MAX_SEQ_LEN = LONG_PROMPT_TOKENS + 64
SETTLE_S = 0.5  # wait, so that the previous contender's threads have stopped spinning

OWN_ENVIRONMENT = "transformers"  # the peer that is installed in this project's environment


class Batch(NamedTuple):
    """The sizes of a batch of prompts that are continued together."""

    sequences: int
    prompt_tokens: int
    new_tokens: int


SINGLE = Batch(1, PROMPT_TOKENS, NEW_TOKENS)
MANY = Batch(SEQUENCES, PROMPT_TOKENS, NEW_TOKENS)
LONG = Batch(1, LONG_PROMPT_TOKENS, 1)
BATCHES = (SINGLE, MANY, LONG)

#: Each column's heading, the batch that is timed for it, and the field of the timing that it shows.
COLUMNS: dict[str, tuple[Batch, Callable[[Timing], float | None]]] = {
    "decode step, 1 sequence, ms": (SINGLE, lambda timing: timing.decode_s),
    f"{SEQUENCES} sequences, ms": (MANY, lambda timing: timing.decode_s),
    f"prefill {SEQUENCES} × {PROMPT_TOKENS}, ms": (MANY, lambda timing: timing.prefill_s),
    f"prefill 1 × {LONG_PROMPT_TOKENS}, ms": (LONG, lambda timing: timing.prefill_s),
}


@dataclass(slots=True)
class Contender:
    """A worker process that is measured, and its timings.

    Attributes:
        ours: whether the worker runs one of our phases.
        found: for each batch its timings, one for each turn.
    """

    worker: WorkerProcess
    ours: bool
    found: dict[Batch, list[Timing]] = field(default_factory=dict)

    def turn(self, turn: int, vocab_size: int) -> None:
        """Measure every batch once, with the prompts of this turn."""
        for batch in BATCHES:
            order = {"prompts": prompts(batch, turn, vocab_size), "new_tokens": batch.new_tokens}
            self.found.setdefault(batch, []).append(Timing(**self.worker.ask(order)))

    def medians_s(self) -> list[float]:
        """Return the median seconds of every column."""
        return [
            statistics.median(
                seconds for timing in self.found[batch] if (seconds := read(timing)) is not None
            )
            for batch, read in COLUMNS.values()
        ]

    def first_tokens(self) -> list[int]:
        """Return the first token of every sequence of every turn."""
        return [token for batch in BATCHES for timing in self.found[batch] for token in timing.first_tokens]


def prompts(batch: Batch, turn: int, vocab_size: int) -> list[list[int]]:
    """Draw the prompts of a batch. They differ from turn to turn, and are the same for every contender."""
    draw = random.Random(f"{batch}:{turn}")
    return [draw.choices(range(vocab_size), k=batch.prompt_tokens) for _ in range(batch.sequences)]


def find_peer(name: str, quantize: Quantize) -> tuple[str, Environment | None]:
    """Split `PEER=FOLDER` into the peer's name and its virtual environment; None: this project's environment.

    Raises:
        StartupError: there is no such peer, it is not installed, or it is not measured with quantized weights.
    """
    peer, _, folder = name.partition("=")
    if quantize != "none" and not (peer in LIBRARIES and LIBRARIES[peer].converts):
        raise StartupError(f"--peer {name}: with --quantize, only openvino and llama.cpp are measured")
    if name == OWN_ENVIRONMENT:
        return name, None
    if peer not in LIBRARIES:
        raise StartupError(f"--peer {name}: there are {OWN_ENVIRONMENT}, {', '.join(LIBRARIES)}")
    return peer, find_environment(peer, folder)


def start_peer(
    peer: str, environment: Environment | None, weights: Weights, options: Options
) -> WorkerProcess:
    """Start a library's worker on the weights. A library that does not read Hugging Face folders gets converted
    weights."""
    if environment is None:
        return WorkerProcess(peer, options)
    library = LIBRARIES[peer]
    options = options._replace(max_pass_tokens=library.max_pass_tokens)
    if library.converts:
        folder = converted(weights, library.module, environment.python, environment.version)
        options = options._replace(folder=str(folder))
    return WorkerProcess(library.module, options, environment.python)


def reading_s(num_bytes: int) -> float:
    """Return the seconds that torch's threads take to read `num_bytes` bytes: the best of 20 runs."""
    memory = torch.ones(num_bytes // 4)
    return min(milliseconds(memory.sum, 1) for _ in range(20)) / 1e3


def measure(
    contenders: Sequence[Contender], floor: Callable[[], float], repeats: int, vocab_size: int
) -> float:
    """Time each engine (contender) `repeats` times, in alternating order, after a turn that warms up.

    The times are kept in the contenders. `floor` is called once in each turn, too, and returns the seconds of
    reading all weights once: the least that a step can take.

    Returns:
        The median of the values that `floor` returned, in seconds.
    """
    floors = []
    for turn in range(repeats + 1):
        for contender in contenders if turn % 2 else contenders[::-1]:
            time.sleep(SETTLE_S)
            contender.turn(turn, vocab_size)
        time.sleep(SETTLE_S)
        floors.append(floor())
        if turn == 0:
            floors.clear()
            for contender in contenders:
                contender.found.clear()
    return statistics.median(floors)


def rows_of(contenders: Sequence[Contender], floor_s: float) -> list[list[Cell]]:
    """Return a row for each contender and one for the lower bound. If there are peers, the last row has the ratios
    of our last phase to the fastest peer of each column."""
    found = {contender.worker.name: contender.medians_s() for contender in contenders}
    *_, own = (contender for contender in contenders if contender.ours)
    others = [contender for contender in contenders if not contender.ours]
    expected = own.first_tokens()
    rows: list[list[Cell]] = []
    for contender in contenders:
        same = sum(a == b for a, b in zip(expected, contender.first_tokens(), strict=True))
        times: list[Cell] = [seconds * 1e3 for seconds in found[contender.worker.name]]
        rows.append([contender.worker.name, *times, f"{same} of {len(expected)}"])
    rows.append(["reading the weights once", floor_s * 1e3, floor_s * 1e3, None, None, ""])
    if others:
        best = [min(times) for times in zip(*(found[c.worker.name] for c in others), strict=True)]
        ratios = [mine / theirs for mine, theirs in zip(found[own.worker.name], best, strict=True)]
        rows.append([f"{own.worker.name} ÷ the best of the others", *ratios, ""])
    return rows


def passes(
    model: str = "dummy:llama-135m",
    phase: tuple[str, ...] = (phase_names()[-1],),
    peer: tuple[str, ...] = (OWN_ENVIRONMENT,),
    repeats: int = 3,
    dtype: Dtype = "bfloat16",
    quantize: Quantize = "none",
    threads: int = torch.get_num_threads(),
) -> Iterator[MeasuredTable]:
    """Start all workers, and measure them in turns.

    Args:
        phase: numbers or names; the last one is compared
        peer: transformers, or a library with its virtual environment: vllm=DIR, openvino=DIR, llama.cpp=DIR
        quantize: weights as int8; llama.cpp then gets Q8_0
        threads: number of threads that compute, for each program
    """
    torch.set_num_threads(threads)
    peers = [find_peer(name, quantize) for name in peer]
    weights = weights_of(model, dtype, quantize=quantize)
    options = weights.options(
        max_seq_len=MAX_SEQ_LEN, max_sequences=SEQUENCES, kv_tokens=SEQUENCES * MAX_SEQ_LEN, threads=threads
    )
    with ExitStack() as stack:
        contenders = []
        for name in phase:
            say(f"starting phase {name}")
            ours = options._replace(phase=name, max_pass_tokens=LONG_PROMPT_TOKENS)
            contenders.append(Contender(stack.enter_context(WorkerProcess("ours", ours)), ours=True))
        for name, environment in peers:
            say(f"starting {name}")
            worker = start_peer(name, environment, weights, options)
            contenders.append(Contender(stack.enter_context(worker), ours=False))
        int8: Literal["none", "all"] = "none" if quantize == "none" else "all"
        num_bytes = weight_bytes(weights.config, weights.dtype, int8=int8)
        floor_s = measure(contenders, lambda: reading_s(num_bytes), repeats, weights.config.vocab_size)
    yield MeasuredTable(
        name="decode_step" if quantize == "none" else f"decode_step_{quantize}",
        title="one pass" if quantize == "none" else f"one pass with {quantize} weights",
        setup={
            "model": f"{model} in {weights.dtype_name}",
            "decode after prompts of": f"{PROMPT_TOKENS} tokens",
            "median of": f"{repeats} turns",
        },
        columns=["computed by", *COLUMNS, "first tokens as ours"],
        rows=rows_of(contenders, floor_s),
    )
