"""Long prompts a chunk at a time (Agrawal et al. 2023, Sarathi): nobody's next token waits for all of it.

Who decodes is in every step; prompts share a budget of tokens, those that have begun first. That is the stall-free
schedule of Sarathi-Serve (Agrawal et al., OSDI 2024).

```text
a prompt of 1000 tokens arrives while A and B decode                                  time ──>

  phase 6   steps  ├──┼──┼──┼──────────────────────────────────┼──┼──┼──┤      one step is long
            A         a  a  a                                  a  a  a  a
            B         b  b  b                                  b  b  b  b
            C               └───────────── 1000 ──────────────┘c  c  c  c

  phase 7   steps  ├──┼──┼──┼──────────┼──────────┼──────────┼─────────┼──┼──┤   none is long
            A         a  a  a          a          a          a         a  a  a
            B         b  b  b          b          b          b         b  b  b
            C               └── 256 ──┘└── 256 ──┘└── 256 ──┘└─ 232 ──┘c  c  c
```
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from common.engine import Clock
from common.request import Request, RequestState
from common.scheduling import PrefillChunk, StepPlan
from phase6_paged.scheduler import PagedScheduler
from phase7_chunked.config import Config


class ChunkedScheduler(PagedScheduler):
    """Phase 6's admission, which reserves a whole prompt's blocks; then the prompt advances chunk by chunk."""

    def __init__(self, config: Config, clock: Clock) -> None:
        super().__init__(config, clock)
        self.chunk_size = config.prefill_chunk_size
        self.max_chunks = config.max_prefill_chunks_per_step
        self.token_budget = config.prefill_token_budget

    def plan(self) -> StepPlan:
        """A token for everyone who decodes, and a chunk of each prompt that a step has room for."""
        return StepPlan(
            decode=tuple(r for r in self._active if r.wants_token),
            prefill=tuple(self.chunks(self.prefill_requests(self.max_chunks))),
        )

    def prefill_requests(self, max_chunks: int | None) -> list[Request]:
        """Whose prompts advance, in this order: those that have begun, oldest first, then newcomers.

        Args:
            max_chunks: how many of them at the most; None: all.
        """
        prefilling = [r for r in self._active if r.state is RequestState.PREFILL]
        return sorted(prefilling, key=lambda r: (not r.has_begun, r.arrival))[:max_chunks]

    def chunks(self, requests: Iterable[Request]) -> Iterator[PrefillChunk]:
        """The next chunk of each, until the tokens of the budget are dealt out.

        The last one to get some is cut to what is left: fewer steps then carry the same prompts.
        """
        left = sys.maxsize if self.token_budget is None else self.token_budget
        for request in requests:
            start = request.prefill_progress
            tokens = min(self.chunk_size, left, len(request.token_ids) - start)
            yield PrefillChunk(request, start, start + tokens)
            left -= tokens
            if left == 0:
                return
