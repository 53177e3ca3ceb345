"""Generates for one request without a scheduler: the reference that every phase is tested against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from common.engine.commit import commit_token
from common.engine.prompt_scores import PromptScores
from common.kv import KVPool, KVShape, Span
from common.models.layers import CausalLM, TokenBatch
from common.request import Request, RequestState, StepOutput
from common.sampling.draw import read_logprobs, sample
from common.sampling.inputs import TokenMasks


class ContiguousCache(KVPool):
    """KV memory of `sequences` sequences. Each sequence has one block with room for `tokens` tokens."""

    def __init__(self, shape: KVShape, device: torch.device, tokens: int, sequences: int = 1) -> None:
        super().__init__(shape, device)
        self._tokens = tokens
        self._sequences = sequences
        self.k, self.v = shape.allocate(sequences, tokens, device)
        self._block_tables = torch.arange(sequences).unsqueeze(1)

    @property
    def block_size(self) -> int:
        return self._tokens

    @property
    def num_blocks(self) -> int:
        return self._sequences

    @property
    def block_tables(self) -> Tensor:
        return self._block_tables

    def reserve(self, request: Request, tokens: int) -> bool:
        if tokens > self._tokens:
            return False
        if request.slot is None:
            free = set(range(self._sequences)) - self._lengths.keys()
            if not free:
                return False
            request.slot = min(free)
            self._lengths[request.slot] = 0
        return True

    def _free(self, slot: int) -> None:
        del self._lengths[slot]

    def capacity(self, slot: int) -> int:
        self.get_seq_len(slot)
        return self._tokens

    def block_table(self, slot: int) -> Sequence[int]:
        self.get_seq_len(slot)
        return (slot,)

    def max_request_tokens(self) -> int | None:
        return self._tokens

    @property
    def reserved_tokens(self) -> int:
        return self._tokens * self._sequences


def generate(model: CausalLM, request: Request) -> Iterator[StepOutput]:
    """Run one request to its end. Yields an output for each token.

    ```text
    pass 1   the whole prompt                         -> first token
    pass n   the latest token, at the next column     -> next token
    ```

    Raises:
        ValueError: prompt and new tokens go past the model's positions.
    """
    if request.max_total_tokens > model.max_positions:
        raise ValueError(
            f"prompt and new tokens make {request.max_total_tokens}, the model has {model.max_positions} positions"
        )
    cache = ContiguousCache(model.config.kv_shape(model.dtype), model.device, request.max_total_tokens)
    cache.reserve(request, request.max_total_tokens)
    request.start_prefill()
    try:
        while not request.is_terminal:
            start = cache.get_seq_len(0)
            token_ids = request.token_ids[start:]  # tokens that the cache does not hold yet
            span = Span.exact(0, start, start + len(token_ids))
            view = cache.view([span])
            batch = TokenBatch(
                token_ids=torch.tensor(token_ids, device=model.device),
                positions=view.positions,
                logit_rows=torch.tensor([len(token_ids) - 1], device=model.device),
            )
            scores = PromptScores.of([(request, span)])
            logits = scores.forward(model, batch, view) if scores.asked else model(batch, view)
            view.advance()
            if request.state is RequestState.PREFILL:
                request.start_decode()
            sampled = sample(logits, [request], TokenMasks.of([request]))
            yield commit_token(request, int(sampled.token_ids.item()), read_logprobs(sampled, [request])[0])
    finally:
        cache.release(request)
