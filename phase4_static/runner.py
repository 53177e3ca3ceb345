"""Computes a rectangle: prompts padded to the longest prompt, then one token of every row in each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.engine.runner import ForwardPass, PassShare, Runner
from common.engine.scheduling import PrefillChunk, StepPlan
from common.kv import Span
from common.request import Request


class StaticRunner(Runner):
    """Runs one pass a step: either all prompts, or one token of every row.

    A row is the tokens of one sequence. A pass that fails is not split: all requests of the batch that have
    not ended fail.
    """

    def passes(self, plan: StepPlan) -> Iterable[ForwardPass]:
        if plan.decode:
            yield self.decode_pass(plan.decode)
        if plan.prefill:
            yield self.prefill_pass(plan.prefill)

    def prefill_pass(self, chunks: Sequence[PrefillChunk]) -> ForwardPass:
        """Return the pass of all B prompts, each padded on the right to the longest: B × longest tokens.

        The padding repeats the prompt's own last token. No query of a prompt sees the padding, but attention
        multiplies the padding's values by the weight 0, and 0 × NaN is NaN. Padding with another token could bring
        in a NaN that the prompt does not have.
        """
        longest = max(chunk.end for chunk in chunks)
        shares = tuple(
            PassShare(
                request=chunk.request,
                span=Span(slot=self.slot(chunk.request), start=0, end=longest, length=chunk.end),
                token_ids=[*chunk.token_ids, *chunk.token_ids[-1:] * (longest - chunk.end)],
                sample_at=range(0) if chunk.request.is_terminal else range(chunk.end - 1, chunk.end),
            )
            for chunk in chunks
        )
        padded = sum(longest - chunk.end for chunk in chunks)
        return ForwardPass(shares, splittable=False, padded_tokens=padded)

    def decode_pass(self, requests: Sequence[Request]) -> ForwardPass:
        """Return the pass that computes each row's latest token. Rows of ended requests are idle."""
        shares = tuple(self.idle_share(r) if r.is_terminal else self.decode_share(r) for r in requests)
        return ForwardPass(shares, splittable=False, idle_rows=sum(r.is_terminal for r in requests))

    def idle_share(self, request: Request) -> PassShare:
        """Return an idle row's part of a pass: the row's last column is computed again, without sampling."""
        slot = self.slot(request)
        length = self.pool.get_seq_len(slot)
        column = max(length - 1, 0)
        span = Span(slot, column, column + 1, length)
        return PassShare(request, span, request.token_ids[column : column + 1], range(0))
