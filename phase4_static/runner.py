"""The rectangle: prompts padded to the longest, then one column a step until the last row is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.kv import Span
from common.request import Request
from common.runner import ForwardPass, PassShare, Runner
from common.scheduling import PrefillChunk, StepPlan

PAD_TOKEN = 0  # any id will do: pad columns lie above every real query and decode overwrites them


class StaticRunner(Runner):
    """One pass a step: either all prompts or one token of every row.

    A pass is not split after a failure: the rectangle is the unit that fails.
    """

    def passes(self, plan: StepPlan) -> Iterable[ForwardPass]:
        if plan.decode:
            yield self.decode_pass(plan.decode)
        if plan.prefill:
            yield self.prefill_pass(plan.prefill)

    def prefill_pass(self, chunks: Sequence[PrefillChunk]) -> ForwardPass:
        """Every prompt padded on the right to the longest: T = B × longest. The padding is the lesson."""
        longest = max(chunk.end for chunk in chunks)
        shares = tuple(
            PassShare(
                request=chunk.request,
                span=Span(slot=self.slot(chunk.request), start=0, end=longest, length=chunk.end),
                token_ids=[*chunk.token_ids, *[PAD_TOKEN] * (longest - chunk.end)],
                sample_at=range(0) if chunk.request.is_terminal else range(chunk.end - 1, chunk.end),
            )
            for chunk in chunks
        )
        padded = sum(longest - chunk.end for chunk in chunks)
        return ForwardPass(shares, splittable=False, padded_tokens=padded)

    def decode_pass(self, requests: Sequence[Request]) -> ForwardPass:
        """The last token of every row; rows that are done go along idle."""
        shares = tuple(self.idle_share(r) if r.is_terminal else self.decode_share(r) for r in requests)
        return ForwardPass(shares, splittable=False, idle_rows=sum(r.is_terminal for r in requests))

    def idle_share(self, request: Request) -> PassShare:
        """A dummy token into the row's own last column, again and again: it stands still and harms nobody."""
        slot = self.slot(request)
        length = self.pool.get_seq_len(slot)
        column = max(length - 1, 0)
        return PassShare(request, Span(slot, column, column + 1, length), [PAD_TOKEN], range(0))
