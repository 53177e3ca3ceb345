"""Decode first, since those tokens already flow; then all newcomers' prompts in one pass, end to end.

```text
phase 4   p p p · · · ·       phase 5   p p p p p p p p p p p p
          p p p p p p p                 └ A ┘ └──── B ────┘ └C┘
          p p · · · · ·       no padding, whatever the lengths
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.kv import Span
from common.request import Request
from common.runner import ForwardPass, PassRow
from common.scheduling import PrefillChunk, StepPlan
from phase4_static.runner import StaticRunner


class ContinuousRunner(StaticRunner):
    """Two passes a step at most; the flat pass takes any subset of slots and any lengths as they are."""

    def decode_pass(self, requests: Sequence[Request]) -> ForwardPass:
        return ForwardPass(tuple(self.decode_row(request) for request in requests))

    def prefill_pass(self, chunks: Sequence[PrefillChunk]) -> ForwardPass:
        return ForwardPass(tuple(self.prefill_row(chunk) for chunk in chunks))

    def prefill_row(self, chunk: PrefillChunk) -> PassRow:
        """A chunk's tokens at their own columns; the last one's logits choose the next token."""
        return PassRow(
            request=chunk.request,
            span=Span.exact(self.slot(chunk.request), chunk.start, chunk.end),
            token_ids=chunk.token_ids,
            sample_at=chunk.end - chunk.start - 1 if chunk.is_last else None,
        )


class OneByOneRunner(ContinuousRunner):
    """Every newcomer in a pass of its own, which reads all weights again: what `together` saves."""

    def passes(self, plan: StepPlan) -> Iterable[ForwardPass]:
        if plan.decode:
            yield self.decode_pass(plan.decode)
        for chunk in plan.prefill:
            yield self.prefill_pass([chunk])
