"""Helpers that build forward passes of a model on the CPU, without an engine, and time them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from common.engine.reference import ContiguousCache
from common.kv import KVView, Span
from common.models.layers import CausalLM, TokenBatch
from common.models.registry import load_model, open_checkpoint
from common.request import Request, SamplingParams
from kernels.native import load_native_kernels
from kernels.tape import record

CONTEXT = 128  # cached tokens before a decoded token
PROMPT = 512

Run = Callable[[], object]


class Passes:
    """Builds passes of one model: decode steps after `CONTEXT` cached tokens, and a prompt of `tokens`."""

    def __init__(self, model: CausalLM, batch: Sequence[int], tokens: int = PROMPT) -> None:
        self.model = model
        self.tokens = tokens
        shape = model.config.kv_shape(model.dtype)
        self.cache = ContiguousCache(shape, model.device, max(CONTEXT + 1, tokens), max(batch))
        for i in range(max(batch)):
            self.cache.reserve(Request(f"{i}", [0], SamplingParams()), CONTEXT + 1)
        self.cache.advance(Span.exact(slot, 0, CONTEXT) for slot in range(max(batch)))

    def decode(self, count: int) -> tuple[TokenBatch, KVView]:
        return self._batch([Span.exact(slot, CONTEXT, CONTEXT + 1) for slot in range(count)])

    def prompt(self) -> tuple[TokenBatch, KVView]:
        return self._batch([Span.exact(0, 0, self.tokens)])

    def _batch(self, spans: Sequence[Span]) -> tuple[TokenBatch, KVView]:
        view = self.cache.view(spans)
        tokens = len(view.positions)
        token_ids = torch.arange(tokens) % self.model.config.vocab_size
        last = view.layout.host.query_offsets[1:] - 1
        return TokenBatch(token_ids, view.positions, last), view

    def plain(self, batch: TokenBatch, view: KVView) -> Run:
        return lambda: self.model(batch, view)

    def taped(self, batch: TokenBatch, view: KVView) -> Run:
        """Record a pass on a tape, and return a function that plays it. The tape holds the indices of `view`, so it
        fits these inputs only."""
        tape, _ = record(
            lambda ids, positions: (self.model(TokenBatch(ids, positions, batch.logit_rows), view),),
            batch.token_ids,
            batch.positions,
        )
        return lambda: tape(batch.token_ids, batch.positions)


def milliseconds(run: Run, times: int) -> float:
    """Return the median milliseconds of a call, over `times` calls."""
    taken = []
    for _ in range(times):
        started_s = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started_s)
    return statistics.median(taken) * 1e3


def load_unpacked(name: str, dtype: torch.dtype, positions: int) -> CausalLM:
    device = torch.device("cpu")
    return load_model(open_checkpoint(name), device=device, dtype=dtype, max_positions=positions)


def load_as_served(name: str, dtype: torch.dtype, positions: int) -> CausalLM:
    """Load a model for the CPU. If there are native kernels, its weights are packed, as in a server."""
    native = load_native_kernels()
    model = load_unpacked(name, dtype, positions)
    if native:
        model.pack()
    return model
