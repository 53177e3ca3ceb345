"""Computes decode tokens in the same forward pass as chunks, so that most steps read the weights only once.

The flat pass needs no change for that. A chunk is the tokens `start:end` of its sequence. Their queries see
the columns before them, including those of earlier chunks.

```text
  one pass     a b c d  | E256 E257 … E511           decode tokens of A, B, C and D, then a chunk of E
  positions    9 4 7 31 | 256  257  … 511
```
"""

from __future__ import annotations

from collections.abc import Iterable

from common.engine.runner import ForwardPass
from common.engine.scheduling import StepPlan
from phase5_continuous.runner import ContinuousRunner
from phase7_chunked.config import Config


class ChunkedRunner(ContinuousRunner):
    """Computes phase 5's passes, except that the first pass of chunks computes the decode tokens, too.

    Without `use_chunked_prefill` or `mixed_batches`, the passes are phase 5's.
    """

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
