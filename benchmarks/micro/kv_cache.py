"""The next token of a text, with the keys and values of the tokens before it in a cache and without.

```text
with      a pass over the last token     its query is compared with the cached keys
without   a pass over the whole text     all keys and values are computed again; only the last row gets logits
```

Both variants use the same model, cache and position rule. The variant "without" computes all tokens of the text in
each pass, from position 0 on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from benchmarks.micro import Dtype, in_turns
from benchmarks.micro.passes import load_as_served, milliseconds
from benchmarks.tables import Cell, MeasuredTable
from common.engine.reference import ContiguousCache
from common.kv import Span
from common.models.layers import CausalLM, TokenBatch
from common.request import Request, SamplingParams


class Text:
    """A model, and a KV cache that holds the keys and values of one text."""

    def __init__(self, model: CausalLM, length: int) -> None:
        self.model = model
        self.cache = ContiguousCache(model.config.kv_shape(model.dtype), model.device, length)
        self.cache.reserve(Request("text", [0], SamplingParams()), length)

    def next_token(self, token_ids: Sequence[int], start: int) -> int:
        """Return the most likely token after a text. Computes the text's tokens from position `start` on; the cache
        must hold the tokens before."""
        view = self.cache.view([Span.exact(0, start, len(token_ids))])
        batch = TokenBatch(
            token_ids=torch.tensor(token_ids[start:]),
            positions=view.positions,
            logit_rows=torch.tensor([len(token_ids) - start - 1]),
        )
        logits = self.model(batch, view)
        view.advance()
        return int(logits.argmax())


def measure(model: CausalLM, lengths: Sequence[int], repeats: int) -> list[list[Cell]]:
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


def steps(
    model: str = "dummy:llama-60m",
    lengths: tuple[int, ...] = (16, 64, 256, 1024, 2048),
    repeats: int = 3,
    dtype: Dtype = "float32",
) -> Iterator[MeasuredTable]:
    """Time the next token of texts of several lengths, with the KV cache and without.

    Args:
        lengths: numbers of tokens before the next token
    """
    loaded = load_as_served(model, getattr(torch, dtype), max(lengths) + 1)
    yield MeasuredTable(
        name="kv_cache",
        title="the next token, with a KV cache and without",
        setup={"model": f"{model} in {dtype}", "median of": f"{repeats} turns"},
        columns=["text before it, tokens", "with, ms", "without, ms", "without / with", "cache, MB"],
        rows=measure(loaded, lengths, repeats),
    )
