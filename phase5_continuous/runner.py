"""Computes decode tokens in a first pass, then prompts end to end in passes of limited length.

```text
phase 4   p p p · · · ·       phase 5   p p p p p p p p p p p p
          p p p p p p p                 └ A ┘ └──── B ────┘ └C┘
          p p · · · · ·       no padding, whatever the lengths
```

The order of passes makes no difference to clients: a step's tokens are delivered after its last pass. A fixed
order makes a step predictable. In a pass of phase 7, decode tokens come before prompts, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from common.engine.runner import ForwardPass, Runner
from common.engine.scheduling import PrefillChunk, StepPlan
from phase5_continuous.config import Config


class ContinuousRunner(Runner):
    """Runs flat passes: the tokens of several sequences, of any lengths, end to end and without padding."""

    config: Config

    def passes(self, plan: StepPlan) -> Iterable[ForwardPass]:
        if plan.decode:
            yield ForwardPass(tuple(map(self.decode_share, plan.decode)))
        for chunks in self.share_out(plan.prefill):
            yield ForwardPass(tuple(map(self.prefill_share, chunks)))

    def share_out(self, prefill: Sequence[PrefillChunk]) -> Iterator[list[PrefillChunk]]:
        """Divide chunks among passes, in order. Yields the chunks of each pass.

        A pass takes up to `max_prefill_pass_tokens` tokens, or one longer chunk. This bounds a pass's activation
        memory, which grows with its tokens.
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
