"""The next token of a text, with the keys and values of the tokens before it in a cache and without.

```text
with      a pass over the last token     its query is compared with the cached keys
without   a pass over the whole text     all keys and values are computed again; only the last row gets logits
```

Both ways use the same model, cache and position rule. Without the cache, each pass begins at column 0.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from benchmarks.micro import Dtype, in_turns, medians
from benchmarks.micro.passes import load_as_served, milliseconds
from benchmarks.tables import Cell, MeasuredTable
from common.generate import ContiguousCache
from common.kv import KVShape, Span
from common.models.layers import CausalLM, TokenBatch
from common.request import Request, SamplingParams

PROMPT_TOKENS, NEW_TOKENS = 64, 128


class Answer(NamedTuple):
    """An answer, and the passes, tokens and seconds that it took."""

    token_ids: list[int]
    passes: int
    computed_tokens: int
    seconds: float


class Text:
    """A text that grows, and its keys and values."""

    def __init__(self, model: CausalLM, length: int) -> None:
        self.model = model
        self.cache = ContiguousCache(KVShape.of(model.config, model.dtype), model.device, length)
        self.cache.reserve(Request("text", [0], SamplingParams()), length)

    def next_token(self, token_ids: Sequence[int], start: int) -> int:
        """Return the most likely token after a text, computing the text from column `start` on."""
        view = self.cache.view([Span.exact(0, start, len(token_ids))])
        batch = TokenBatch(
            token_ids=torch.tensor(token_ids[start:]),
            positions=view.positions,
            logit_rows=torch.tensor([len(token_ids) - start - 1]),
        )
        logits = self.model(batch, view)
        view.advance()
        return int(logits.argmax())


def measure_steps(model: CausalLM, lengths: Sequence[int], repeats: int) -> list[list[Cell]]:
    """Time a decode step with and without the KV cache, in turns. Returns a row of medians for each length."""
    rows: list[list[Cell]] = []
    for length in lengths:
        text = Text(model, length + 1)
        token_ids = [place % model.config.vocab_size for place in range(length + 1)]
        text.next_token(token_ids[:-1], 0)  # fills the cache
        passes = {start: functools.partial(text.next_token, token_ids, start) for start in (length, 0)}
        ways = {start: functools.partial(milliseconds, run, 3) for start, run in passes.items()}
        kept, again = in_turns(ways, repeats).values()
        megabytes = (length + 1) * text.cache.shape.bytes_per_token / 2**20
        rows.append([length, kept, again, again / kept, megabytes])
    return rows


def answer(model: CausalLM, prompt: Sequence[int], new_tokens: int, *, cached: bool) -> Answer:
    """Compute a prompt's most likely continuation."""
    text = Text(model, len(prompt) + new_tokens)
    token_ids, held, computed = list(prompt), 0, 0
    started_s = time.perf_counter()
    for _ in range(new_tokens):
        start = held if cached else 0
        computed += len(token_ids) - start
        held = len(token_ids)
        token_ids.append(text.next_token(token_ids, start))
    elapsed_s = time.perf_counter() - started_s
    return Answer(token_ids[len(prompt) :], new_tokens, computed, elapsed_s)


def measure_answers(model: CausalLM, repeats: int) -> list[list[Cell]]:
    """Return a row for each way: the answer, and the median of its times."""
    prompt = [place % model.config.vocab_size for place in range(PROMPT_TOKENS)]
    ways = {"with the cache": True, "without": False}
    turns = [
        [answer(model, prompt, NEW_TOKENS, cached=cached) for cached in ways.values()] for _ in range(repeats)
    ]
    seconds = medians([each.seconds for each in turn] for turn in turns)
    expected = turns[0][0].token_ids
    rows: list[list[Cell]] = []
    for name, found, taken in zip(ways, turns[0], seconds, strict=True):
        same = sum(mine == other for mine, other in zip(found.token_ids, expected, strict=True))
        rows.append([name, found.passes, found.computed_tokens, taken, NEW_TOKENS / taken, same])
    return rows


def steps(
    model: str = "dummy:llama-60m",
    lengths: tuple[int, ...] = (16, 64, 256, 1024, 2048),
    repeats: int = 3,
    dtype: Dtype = "float32",
) -> Iterator[MeasuredTable]:
    """Time the next token of texts of several lengths, both ways.

    Args:
        lengths: tokens before it
    """
    loaded = load_as_served(model, getattr(torch, dtype), max(lengths) + 1)
    yield MeasuredTable(
        name="kv_cache",
        title="the next token, with a KV cache and without",
        setup={"model": f"{model} in {dtype}", "median of": f"{repeats} turns"},
        columns=["text before it, tokens", "with, ms", "without, ms", "without / with", "cache, MB"],
        rows=measure_steps(loaded, lengths, repeats),
    )


def answers(
    model: str = "dummy:llama-60m", repeats: int = 3, dtype: Dtype = "float32"
) -> Iterator[MeasuredTable]:
    """Time a whole answer, both ways."""
    loaded = load_as_served(model, getattr(torch, dtype), PROMPT_TOKENS + NEW_TOKENS)
    yield MeasuredTable(
        name="kv_cache_answer",
        title=f"an answer of {NEW_TOKENS} tokens to a prompt of {PROMPT_TOKENS}",
        setup={"model": f"{model} in {dtype}", "median of": f"{repeats} turns"},
        columns=["run", "passes", "tokens computed", "seconds", "tokens / s", "tokens that are the same"],
        rows=measure_answers(loaded, repeats),
    )
