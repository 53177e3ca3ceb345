"""One pass of our engine beside one pass of `transformers`, on the same weights, each in a process of its own.

Each contender continues a batch of prompts, greedily. Prefill is the time until every sequence has its first token.
A decode step is the mean time of the steps that give every sequence one more token. The contenders take turns, so
that a machine that slows down slows all. Every turn has new prompts, which no cache holds. No sequence decodes
while a prompt is computed, so our engine may compute 2048 prompt tokens at once.

A lower bound of a decode step is measured in the same turns: the time to read every weight once.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks.micro import Dtype, processes, say
from benchmarks.micro.on_device import add, build_engine
from benchmarks.micro.passes import milliseconds
from benchmarks.peers.weights import weights_of
from benchmarks.tables import Cell, MeasuredTable
from common.engine.engine import Engine
from common.models.registry import weight_bytes
from common.startup.phases import find_phase, phase_names

PROMPT_TOKENS, LONG_PROMPT_TOKENS, NEW_TOKENS = 128, 2048, 40
SEQUENCES = 16
SETTLE_S = 0.5  # wait, so that the previous contender's threads have stopped spinning
THEIRS = "transformers"


class Batch(NamedTuple):
    """The sizes of a batch of prompts that are continued together."""

    sequences: int
    prompt_tokens: int
    new_tokens: int


class Timing(NamedTuple):
    """The times of one batch, from its prompts to its last tokens.

    Attributes:
        prefill_s: seconds until every sequence had its first token.
        decode_s: mean seconds of the steps that gave every sequence a token; None if there was no such step.
        first_tokens: the first token of each sequence, in order.
    """

    prefill_s: float
    decode_s: float | None
    first_tokens: list[int]


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

Found = Mapping[str, Mapping[Batch, Sequence[Timing]]]  # of each contender and batch, a timing for each turn


def prompts(batch: Batch, turn: int, vocab_size: int) -> list[list[int]]:
    """Draw the prompts of a batch. They differ from turn to turn, and are the same for every contender."""
    draw = random.Random(f"{batch}:{turn}")
    return [draw.choices(range(vocab_size), k=batch.prompt_tokens) for _ in range(batch.sequences)]


# ---------------------------------------------------------------------- contenders, in processes of their own


def continue_ours(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
    """Serve prompts together with a phase's engine."""
    for prompt in prompts:
        add(engine, prompt, new_tokens)
    first: dict[str, int] = {}
    steps: list[float] = []
    prefill_s = 0.0
    while engine.has_work:
        all_began = len(first) == len(prompts)
        began_s = time.perf_counter()
        outputs = engine.step()
        elapsed_s = time.perf_counter() - began_s
        for output in outputs:
            assert output.token_id is not None, output.error
            first.setdefault(output.request_id, output.token_id)
        if not all_began:
            prefill_s += elapsed_s
        elif len(outputs) == len(prompts):
            steps.append(elapsed_s)
    return Timing(prefill_s, statistics.mean(steps) if steps else None, list(first.values()))


class Streamer:
    """Notes the times at which `generate` of transformers hands out tokens: first all prompts, then in each step
    one token of every sequence."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.first_tokens: list[int] = []

    def put(self, values: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter())
        if len(self.times_s) == 2:
            self.first_tokens = values.reshape(-1).tolist()

    def end(self) -> None:
        """Do nothing. `generate` calls this after the last step's tokens."""


@torch.inference_mode()
def continue_theirs(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
    """Continue prompts of the same length together with `generate` of a transformers model."""
    ids, clock = torch.tensor(prompts), Streamer()
    began_s = time.perf_counter()
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, streamer=clock)
    _, first_s, *_ = clock.times_s
    steps = len(clock.times_s) - 2
    decode_s = (clock.times_s[-1] - first_s) / steps if steps else None
    return Timing(first_s - began_s, decode_s, clock.first_tokens)


class Continue(Protocol):
    """The signature of a contender: the prompts, and the number of new tokens of each."""

    def __call__(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing: ...


_contender: Continue


def start(name: str, model: str, dtype: str, threads: int) -> str:
    """Load the weights in this process, for `measure`. Returns the contender's name in the table."""
    global _contender
    torch.set_num_threads(threads)
    if name == THEIRS:
        import transformers  # takes seconds, and only this contender needs it

        load: Any = transformers.AutoModelForCausalLM  # transformers leaves it untyped
        theirs = load.from_pretrained(weights_of(model, dtype).folder, dtype=getattr(torch, dtype)).eval()
        theirs.generation_config.eos_token_id = None
        theirs.generation_config.pad_token_id = 0
        _contender = functools.partial(continue_theirs, theirs)
        return f"{THEIRS} {transformers.__version__}"
    longest = LONG_PROMPT_TOKENS + 64
    package = find_phase(name)
    options: dict[str, Any] = {"model": model, "device": "cpu", "dtype": dtype, "max_seq_len": longest}
    if "prefill_chunk_size" in package.Config.model_fields:
        options["prefill_chunk_size"] = LONG_PROMPT_TOKENS
    _contender = functools.partial(continue_ours, build_engine(name, max_batch_size=SEQUENCES, **options))
    return f"phase {package.PHASE.number}"


def measure(turn: int, vocab_size: int) -> dict[Batch, Timing]:
    """Continue every batch once, with the prompts of this turn."""
    return {batch: _contender(prompts(batch, turn, vocab_size), batch.new_tokens) for batch in BATCHES}


# ---------------------------------------------------------------------- the table


def rows_of(found: Found, floor_s: float) -> list[list[Cell]]:
    """Return a row for each contender and one for the lower bound. The last row has the ratios of our last phase to
    transformers."""
    *_, own, theirs = found
    times = {
        name: [statistics.median(filter(None, map(read, timings[batch]))) for batch, read in COLUMNS.values()]
        for name, timings in found.items()
    }
    tokens = {
        name: [token for batch in BATCHES for timing in timings[batch] for token in timing.first_tokens]
        for name, timings in found.items()
    }
    rows: list[list[Cell]] = []
    for name in found:
        same = sum(a == b for a, b in zip(tokens[own], tokens[name], strict=True))
        rows.append([name, *(seconds * 1e3 for seconds in times[name]), f"{same} of {len(tokens[own])}"])
    rows.append(["reading the weights once", floor_s * 1e3, floor_s * 1e3, None, None, ""])
    ratios = [ours / other for ours, other in zip(times[own], times[theirs], strict=True)]
    return [*rows, [f"{own} ÷ {theirs}", *ratios, ""]]


def passes(
    model: str = "dummy:llama-135m",
    phase: tuple[str, ...] = (phase_names()[-1],),
    repeats: int = 3,
    dtype: Dtype = "bfloat16",
    threads: int = torch.get_num_threads(),
) -> Iterator[MeasuredTable]:
    """Time passes of phases and of transformers in turns.

    Args:
        phase: numbers or names; the last one is compared
        threads: number of threads that compute, for each contender
    """
    torch.set_num_threads(threads)
    weights = weights_of(model, dtype)
    numbers = torch.ones(weight_bytes(weights.config, weights.dtype) // 4)
    found: dict[str, dict[Batch, list[Timing]]] = {}
    floors: list[float] = []
    with processes((*phase, THEIRS)) as started:
        contenders = []
        for each, process in started.items():
            say(f"starting {each}")
            contenders.append((process.submit(start, each, model, dtype, threads).result(), process))
        for turn in range(repeats + 1):  # the first turn warms up
            for name, process in contenders if turn % 2 else contenders[::-1]:
                time.sleep(SETTLE_S)
                timings = process.submit(measure, turn, weights.config.vocab_size).result()
                for batch, timing in timings.items() if turn else ():
                    found.setdefault(name, {}).setdefault(batch, []).append(timing)
            time.sleep(SETTLE_S)
            floors.append(min(milliseconds(numbers.sum, 1) for _ in range(20)) / 1e3)
    yield MeasuredTable(
        name="decode_step",
        title="one pass",
        setup={
            "model": f"{model} in {dtype}",
            "decode after prompts of": f"{PROMPT_TOKENS} tokens",
            "median of": f"{repeats} turns",
        },
        columns=["computed by", *COLUMNS, "first tokens as ours"],
        rows=rows_of({name: found[name] for name, _ in contenders}, statistics.median(floors[1:])),
    )
