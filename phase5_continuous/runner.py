"""Decode first, then the newcomers' prompts, end to end, in as few passes as their tokens allow.

```text
phase 4   p p p · · · ·       phase 5   p p p p p p p p p p p p
          p p p p p p p                 └ A ┘ └──── B ────┘ └C┘
          p p · · · · ·       no padding, whatever the lengths
```

The order of passes changes nothing for a client: a step's tokens are handed out when its last pass has ended. It is
fixed so that what a step computes can be foretold, and it is the order of sequences where they share a pass (phase 7).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from common.kv import KVPool, Span
from common.models.layers import CausalLM
from common.request import Request
from common.runner import ForwardPass, PassShare
from common.scheduling import PrefillChunk, StepPlan
from common.telemetry import Telemetry
from phase4_static.runner import StaticRunner


class ContinuousRunner(StaticRunner):
    """The flat pass takes any subset of slots and any lengths as they are."""

    def __init__(
        self, model: CausalLM, pool: KVPool, telemetry: Telemetry, *, max_prefill_pass_tokens: int
    ) -> None:
        super().__init__(model, pool, telemetry)
        self.max_prefill_pass_tokens = max_prefill_pass_tokens

    def passes(self, plan: StepPlan) -> Iterable[ForwardPass]:
        if plan.decode:
            yield self.decode_pass(plan.decode)
        for chunks in self.share_out(plan.prefill):
            yield self.prefill_pass(chunks)

    def share_out(self, prefill: Sequence[PrefillChunk]) -> Iterator[list[PrefillChunk]]:
        """Chunks for one pass after the other, in order: as many as `max_prefill_pass_tokens` hold, one at least.

        What a pass needs beside the weights and the KV memory grows with its tokens: this bounds it.
        """
        chunks: list[PrefillChunk] = []
        tokens = 0
        for chunk in prefill:
            size = chunk.end - chunk.start
            if chunks and tokens + size > self.max_prefill_pass_tokens:
                yield chunks
                chunks, tokens = [], 0
            chunks.append(chunk)
            tokens += size
        if chunks:
            yield chunks

    def decode_pass(self, requests: Sequence[Request]) -> ForwardPass:
        return ForwardPass(tuple(self.decode_share(request) for request in requests))

    def prefill_pass(self, chunks: Sequence[PrefillChunk]) -> ForwardPass:
        return ForwardPass(tuple(self.prefill_share(chunk) for chunk in chunks))

    def prefill_share(self, chunk: PrefillChunk) -> PassShare:
        """A chunk's tokens at their own columns; the last one's logits choose the next token."""
        return PassShare(
            request=chunk.request,
            span=Span.exact(self.slot(chunk.request), chunk.start, chunk.end),
            token_ids=chunk.token_ids,
            sample_at=chunk.end - chunk.start - 1 if chunk.is_last else None,
        )
