"""int8 weights beside bfloat16: the time of products and passes, and the loss of accuracy.

Models with both kinds of weights are timed in turns in one run. Recordings of products and passes are played
(`kernels.tape`), so that no Python runs between operators. The machine's bandwidth is measured in the same run, by
reading a large tensor.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.micro import in_turns, say
from benchmarks.micro.passes import CONTEXT, PROMPT, Passes, Run, load_unpacked, milliseconds
from benchmarks.tables import Cell, MeasuredTable
from common.engine.reference import ContiguousCache
from common.kv import Span
from common.models.layers import CausalLM, TokenBatch
from common.models.registry import open_checkpoint
from common.request import Request, SamplingParams
from kernels.native import load_native_kernels
from kernels.tape import record

BF16, INT8 = "bfloat16", "int8"
READ_BYTES = 2**29  # far more than any cache holds
ROOT = Path(__file__).resolve().parents[2]
HEAD_ROWS = 128  # positions whose logits are in memory at a time


def load_both(name: str, positions: int) -> dict[str, CausalLM]:
    """Load a model twice, in bfloat16 and with int8 weights, and pack the weights.

    Raises:
        ValueError: there are no native kernels.
    """
    if not load_native_kernels():
        raise ValueError("there are no native kernels here to measure")
    models = {kind: load_unpacked(name, torch.bfloat16, positions) for kind in (BF16, INT8)}
    models[INT8].quantize()
    for model in models.values():
        model.pack()
    return models


def packed_bytes(model: CausalLM) -> int:
    """Return the bytes of all linear layers of a packed model. A pass reads them once."""
    return sum(layer.packed.nbytes for layer in model.linear_layers() if layer.packed is not None)


def all_products(model: CausalLM, rows: int) -> Run:
    """Return a function that computes every linear layer of a model once, each on an input of `rows` rows.

    The function plays a recording (a tape).
    """
    layers = list(model.linear_layers())
    inputs = {size: torch.randn(rows, size).bfloat16() for size in {layer.in_features for layer in layers}}
    sizes = list(inputs)

    def run(*xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(xs[sizes.index(layer.in_features)]) for layer in layers)[-1:]

    tape, _ = record(run, *inputs.values())
    return lambda: tape(*inputs.values())


def reading() -> Callable[[], float]:
    """Return a function that measures the milliseconds of reading a gigabyte (2**30 bytes)."""
    numbers = torch.ones(READ_BYTES // 4)
    return lambda: milliseconds(numbers.sum, 3) * 2**30 / READ_BYTES


def speed(
    model: str = "dummy:llama-135m", rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64), repeats: int = 5
) -> Iterator[MeasuredTable]:
    """Time a model's linear layers by the number of rows, then whole decode steps and a prompt.

    Args:
        rows: numbers of rows of the input of each layer
    """
    models = load_both(model, max(CONTEXT + 1, PROMPT))
    ways: dict[tuple[str, str, int], Callable[[], float]] = {("read", "", 0): reading()}
    for kind, loaded in models.items():
        for count in rows:
            ways["products", kind, count] = functools.partial(milliseconds, all_products(loaded, count), 10)
        passes = Passes(loaded, (1, 16))
        for count in (1, 16):
            step = passes.taped(*passes.decode(count))
            ways["step", kind, count] = functools.partial(milliseconds, step, 20)
        ways["prompt", kind, PROMPT] = functools.partial(milliseconds, passes.taped(*passes.prompt()), 2)
    found = in_turns(ways, repeats)
    gigabyte_ms = found["read", "", 0]
    reads_ms = {kind: packed_bytes(loaded) / 2**30 * gigabyte_ms for kind, loaded in models.items()}
    setup = {
        "model": model,
        "median of": f"{repeats} turns",
        "reads": f"{2**30 / gigabyte_ms / 1e6:.3g} GB/s",
    }
    table: list[list[Cell]] = []
    for count in rows:
        one, other = (found["products", kind, count] for kind in (BF16, INT8))
        shares = [100 * reads_ms[kind] / ms for kind, ms in ((BF16, one), (INT8, other))]
        table.append([count, one, other, other / one, *shares])
    yield MeasuredTable(
        name="int8_products",
        title="all linear layers of a model, by the number of rows",
        setup=setup,
        columns=["rows", "bfloat16, ms", "int8, ms", "int8 / bfloat16", "bandwidth, %", "int8: bandwidth, %"],
        rows=table,
    )
    table = [["reading the weights once", reads_ms[BF16], reads_ms[INT8], reads_ms[INT8] / reads_ms[BF16]]]
    for name, what, count in (
        ("decode step, 1 sequence", "step", 1),
        ("decode step, 16 sequences", "step", 16),
        (f"prompt of {PROMPT} tokens", "prompt", PROMPT),
    ):
        one, other = (found[what, kind, count] for kind in (BF16, INT8))
        table.append([name, one, other, other / one])
    yield MeasuredTable(
        name="int8_passes",
        title="passes with int8 weights",
        setup=setup | {"context of a decoded token": f"{CONTEXT} tokens"},
        columns=["pass", "bfloat16, ms", "int8, ms", "int8 / bfloat16"],
        rows=table,
    )


# ---------------------------------------------------------------------- accuracy


def states_of(model: CausalLM, ids: Sequence[int]) -> Tensor:
    """Return the hidden states of all T positions of a text, from which the head computes logits: [T, hidden]."""
    cache = ContiguousCache(model.config.kv_shape(model.dtype), model.device, len(ids), 1)
    cache.reserve(Request("text", [0], SamplingParams()), len(ids))
    view = cache.view([Span.exact(0, 0, len(ids))])
    return model.states(TokenBatch(torch.tensor(ids), view.positions, torch.arange(len(ids))), view)


class Compared(NamedTuple):
    """A model's next-token distributions beside those of another model, at every position of a text but the last.

    Attributes:
        perplexity: of this model.
        divergences: the KL divergence of this model from the other at each position, in nats.
        same: the share of positions at which both models have the same most probable token.
    """

    perplexity: float
    divergences: list[float]
    same: float


@torch.inference_mode()
def compare(models: Sequence[CausalLM], ids: Sequence[int]) -> list[Compared]:
    """Compare the next-token distributions of models with those of the first model, on a text."""
    states = [states_of(model, ids) for model in models]
    losses, same = [0.0 for _ in models], [0 for _ in models]
    divergences: list[list[float]] = [[] for _ in models]
    for first in range(0, len(ids) - 1, HEAD_ROWS):
        rows = slice(first, min(first + HEAD_ROWS, len(ids) - 1))
        targets = torch.tensor(ids[rows.start + 1 : rows.stop + 1])
        logs = [
            model.lm_head(state[rows]).double().log_softmax(dim=-1)
            for model, state in zip(models, states, strict=True)
        ]
        likely, best = logs[0].exp(), logs[0].argmax(dim=-1)
        for place, log in enumerate(logs):
            losses[place] += F.nll_loss(log, targets, reduction="sum").item()
            divergences[place] += (likely * (logs[0] - log)).sum(dim=-1).tolist()
            same[place] += int((best == log.argmax(dim=-1)).sum())
    count = len(ids) - 1
    return [
        Compared(math.exp(loss / count), divergence, equal / count)
        for loss, divergence, equal in zip(losses, divergences, same, strict=True)
    ]


def texts_of(name: str, tokens: int, texts: int) -> list[list[int]]:
    """Return at most so many texts of `tokens` tokens of a model, from this documentation."""
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    ids = open_checkpoint(name).tokenizer().encode(pages)
    return [
        ids[first : first + tokens] for first in range(0, min(len(ids) - tokens + 1, tokens * texts), tokens)
    ]


def accuracy(
    models: tuple[str, ...] = ("smollm2", "gemma3-270m"), tokens: int = 2000, texts: int = 16
) -> Iterator[MeasuredTable]:
    """Compare real models with int8 weights and with bfloat16 weights, on texts from this documentation.

    The change in perplexity varies between texts by more than its mean, so its standard error is given, too.

    Args:
        models: names that `infer fetch` knows, or other models
        tokens: length of each text
        texts: number of texts
    """
    rows: list[list[Cell]] = []
    for name in models:
        both = list(load_both(name, tokens).values())
        losses: list[list[float]] = []
        divergences, same = list[float](), list[float]()
        for ids in texts_of(name, tokens, texts):
            found = compare(both, ids)
            losses.append([math.log(each.perplexity) for each in found])
            divergences += found[1].divergences
            same.append(found[1].same)
        changes = [100 * math.expm1(half - whole) for whole, half in losses]
        whole, half = (math.exp(statistics.mean(each)) for each in zip(*losses, strict=True))
        error = statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else None
        worst = sorted(divergences)[int(0.99 * len(divergences))]
        change = 100 * (half / whole - 1)
        mean = statistics.mean(divergences)
        rows.append([name, whole, half, change, error, mean, worst, 100 * statistics.mean(same)])
        say(f"{name}: perplexity {whole:.4f} and {half:.4f}")
    yield MeasuredTable(
        name="int8_accuracy",
        title="real models with int8 weights, beside themselves in bfloat16",
        setup={"texts": f"{texts} of {tokens} tokens, from this site's pages"},
        columns=[
            *("model", "perplexity, bfloat16", "perplexity, int8", "change, %", "its standard error, %"),
            *("KL divergence, mean, nats", "KL divergence, p99, nats", "same most probable token, %"),
        ],
        rows=rows,
    )
