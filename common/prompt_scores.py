"""Log-probabilities of a prompt's own tokens, for requests with `prompt_logprobs`.

The pass that computes keys and values of a prompt has a state for each of its tokens; the head turns the state of
token i into log-probabilities of token i + 1. For sampling only the last one is needed. Here all are, but never at
once: a prompt of 8,000 tokens and a vocabulary of 128,000 would take 4 GB.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.kv import KVView, Span
from common.models.layers import CausalLM, TokenBatch
from common.request import Request, TokenLogprobs

ROWS = 64  # of logits at a time


def scored_columns(request: Request, span: Span) -> range:
    """The columns of a span whose states tell of the next token of the prompt, and have not done so yet."""
    if request.params.prompt_logprobs is None:
        return range(0)
    return range(
        max(span.start, len(request.prompt_logprobs)), min(span.length, request.num_prompt_tokens - 1)
    )


class PromptScores(NamedTuple):
    """What one pass can tell of prompts.

    Attributes:
        rows: of the pass, whose states are needed.
        asked: requests, and which of their columns those rows are.
    """

    rows: list[int]
    asked: list[tuple[Request, range]]

    @classmethod
    def of(cls, shares: Iterable[tuple[Request, Span]]) -> PromptScores:
        """The rows of a pass over these spans, in this order, whose states score a token of a prompt."""
        scores, first_row = cls([], []), 0
        for request, span in shares:
            if columns := scored_columns(request, span):
                scores.rows.extend(first_row + column - span.start for column in columns)
                scores.asked.append((request, columns))
            first_row += span.end - span.start
        return scores

    def forward(self, model: CausalLM, batch: TokenBatch, view: KVView) -> Tensor:
        """The pass: logits of the batch's own rows, and the requests learn of their prompts."""
        own = len(batch.logit_rows)
        rows = torch.cat([batch.logit_rows, torch.tensor(self.rows, device=batch.logit_rows.device)])
        states = model.states(dataclasses.replace(batch, logit_rows=rows), view)
        begin = own
        for request, columns in self.asked:
            targets = request.prompt_token_ids[columns.start + 1 : columns.stop + 1]
            end = begin + len(columns)
            request.prompt_logprobs += score(
                model, states[begin:end], targets, request.params.prompt_logprobs or 0
            )
            begin = end
        logits: Tensor = model.lm_head(states[:own])
        return logits


@torch.inference_mode()
def score(model: CausalLM, states: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of tokens after states.

    Args:
        states: [R, hidden], what the head takes.
        targets: R token ids.
        top: how many of the most likely tokens to name beside each.
    """
    scored: list[TokenLogprobs] = []
    for begin in range(0, len(targets), ROWS):
        logprobs = model.lm_head(states[begin : begin + ROWS]).float().log_softmax(dim=-1)
        wanted = torch.tensor(targets[begin : begin + ROWS], device=logprobs.device).unsqueeze(1)
        picked = logprobs.gather(1, wanted)
        ranks = (logprobs >= picked).sum(dim=1)  # of tokens equally likely, the last place, as in vLLM
        values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
        for logprob, rank, row_ids, row_values in zip(
            picked.squeeze(1).tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True
        ):
            scored.append(TokenLogprobs(logprob, tuple(zip(row_ids, row_values, strict=True)), rank))
    return scored
