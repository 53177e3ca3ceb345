"""Computes chunks and decode tokens in one forward pass, so that the weights are read once a step.

The flat pass needs no change for that. A chunk is the tokens at positions `start` to `end` of its sequence. Their
queries see all columns before them, including those of earlier chunks.

```text
  one pass     a b c d  | E256 E257 … E511           decode tokens of A, B, C and D, then a chunk of E
  positions    9 4 7 31 | 256  257  … 511
```
"""

from __future__ import annotations

from collections.abc import Iterable

from common.runner import ForwardPass
from common.scheduling import StepPlan
from phase5_continuous.runner import ContinuousRunner
from phase7_chunked.config import Config


class ChunkedRunner(ContinuousRunner):
    """Phase 5's runner, but the first pass of chunks computes the decode tokens, too."""

    config: Config

    def passes(self, plan: StepPlan) -> Iterable[ForwardPass]:
        if not (self.config.use_chunked_prefill and self.config.mixed_batches):
            yield from super().passes(plan)
            return
        # Decode first: sequences with one query are computed together (see `AttentionLayout`).
        shares = tuple(map(self.decode_share, plan.decode))
        for chunks in self.share_out(plan.prefill):
            yield ForwardPass((*shares, *map(self.prefill_share, chunks)))
            shares = ()
        if shares:
            yield ForwardPass(shares)
