"""Log-probabilities of a prompt's own tokens, for requests with `prompt_logprobs`.

The pass that computes keys and values of a prompt has a hidden state for each of the prompt's tokens. The model's
head turns the state of token i into log-probabilities of token i + 1. Sampling needs the last state only. Here the
other states go through the head, too, a few at a time: for a prompt of 8,000 tokens and a vocabulary of 128,000,
all logits at once would take 4 GB.
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

ROWS = 64  # rows of logits computed at a time


def scored_columns(request: Request, span: Span) -> range:
    """Return the columns (token positions) of a span whose states predict prompt tokens without log-probabilities
    so far. Empty if the request did not ask for them."""
    if request.params.prompt_logprobs is None:
        return range(0)
    return range(
        max(span.start, len(request.prompt_logprobs)), min(span.length, request.num_prompt_tokens - 1)
    )


class PromptScores(NamedTuple):
    """The rows of a forward pass that give log-probabilities of prompt tokens.

    Attributes:
        rows: indices of these rows in the pass.
        asked: requests, each with the range of its prompt positions whose rows are in `rows`, in the same order.
    """

    rows: list[int]
    asked: list[tuple[Request, range]]

    @classmethod
    def of(cls, shares: Iterable[tuple[Request, Span]]) -> PromptScores:
        """Collect the rows of the columns that `scored_columns` returns, in a pass over these requests' spans."""
        scores, first_row = cls([], []), 0
        for request, span in shares:
            if columns := scored_columns(request, span):
                scores.rows.extend(first_row + column - span.start for column in columns)
                scores.asked.append((request, columns))
            first_row += span.end - span.start
        return scores

    def forward(self, model: CausalLM, batch: TokenBatch, view: KVView) -> Tensor:
        """Run the pass, and append the log-probabilities to each request's `prompt_logprobs`.

        Returns the logits of `batch.logit_rows`, from which tokens are sampled.
        """
        sampled = batch.logit_rows
        assert sampled is not None, "the rows that sample"
        own = len(sampled)
        rows = torch.cat([sampled, torch.tensor(self.rows, device=sampled.device)])
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
    """Return the log-probability and rank of each target token, as the state in the target's row predicts it.

    Args:
        model: its head turns states into logits.
        states: [R, hidden], the head's inputs.
        targets: R token ids, one for each state.
        top: number of most likely tokens to report beside each target.
    """
    scored: list[TokenLogprobs] = []
    for begin in range(0, len(targets), ROWS):
        logprobs = model.lm_head(states[begin : begin + ROWS]).log_softmax(dim=-1)
        wanted = torch.tensor(targets[begin : begin + ROWS], device=logprobs.device).unsqueeze(1)
        picked = logprobs.gather(1, wanted)
        ranks = (logprobs >= picked).sum(dim=1)  # equally likely tokens share the last rank, as in vLLM
        values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
        for logprob, rank, row_ids, row_values in zip(
            picked.squeeze(1).tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True
        ):
            scored.append(TokenLogprobs(logprob, tuple(zip(row_ids, row_values, strict=True)), rank))
    return scored
