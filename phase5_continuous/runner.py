"""Decode first, then the newcomers' prompts, end to end, in as few passes as their tokens allow.

```text
phase 4   p p p · · · ·       phase 5   p p p p p p p p p p p p
          p p p p p p p                 └ A ┘ └──── B ────┘ └C┘
          p p · · · · ·       no padding, whatever the lengths
```

The order of passes changes nothing for a client: a step's tokens are handed out when its last pass has ended. It is
fixed so that what a step computes can be foretold, and it is the order of sequences that share a pass (phase 7).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from common.runner import ForwardPass, Runner
from common.scheduling import PrefillChunk, StepPlan
from phase5_continuous.config import Config


class ContinuousRunner(Runner):
    """The flat pass takes any subset of slots and any lengths as they are."""

    config: Config

    def passes(self, plan: StepPlan) -> Iterable[ForwardPass]:
        if plan.decode:
            yield ForwardPass(tuple(map(self.decode_share, plan.decode)))
        for chunks in self.share_out(plan.prefill):
            yield ForwardPass(tuple(map(self.prefill_share, chunks)))

    def share_out(self, prefill: Sequence[PrefillChunk]) -> Iterator[list[PrefillChunk]]:
        """Divide chunks among passes, in order: a pass takes `max_prefill_pass_tokens` tokens, or one longer chunk.

        The memory that a pass needs beside the weights and the KV memory grows with its tokens: this bounds it.
        """
        chunks: list[PrefillChunk] = []
        tokens = 0
        for chunk in prefill:
            size = chunk.end - chunk.start
            if chunks and tokens + size > self.config.max_prefill_pass_tokens:
                yield chunks
                chunks, tokens = [], 0
            chunks.append(chunk)
            tokens += size
        if chunks:
            yield chunks
