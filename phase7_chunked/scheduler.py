"""Computes long prompts in chunks (Agrawal et al. 2023, Sarathi), so that no step is as long as such a prompt.

Each decoding request is in every step. Prompts share a budget of tokens, and prompts that have begun go
first. That is the stall-free schedule of Sarathi-Serve (Agrawal et al., OSDI 2024).

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

from collections.abc import Iterable, Iterator

from common.engine.scheduling import PrefillChunk, StepPlan
from common.request import Request
from phase6_paged.scheduler import PagedScheduler
from phase7_chunked.config import Config


class ChunkedScheduler(PagedScheduler):
    """Admits like phase 6, which reserves blocks for the whole prompt, then plans the prompt chunk by chunk."""

    config: Config

    def plan(self) -> StepPlan:
        """Plan a token for each decoding request, and chunks of prompts within the step's budget.

        Without `use_chunked_prefill`, plan whole prompts, as phase 6 does.
        """
        if not self.config.use_chunked_prefill:
            return super().plan()
        return StepPlan(
            decode=tuple(r for r in self.active if r.wants_token),
            prefill=tuple(self.chunks(self.prefill_requests())),
        )

    def prefill_requests(self) -> list[Request]:
        """Return the requests whose prompts may advance in this step, in the order of `prefill_priority`: at
        most `max_prefill_chunks_per_step`."""
        prefilling = [r for r in self.active if r.wants_prefill]
        return sorted(prefilling, key=self.prefill_priority)[: self.config.max_prefill_chunks_per_step]

    def prefill_priority(self, request: Request) -> tuple[int, int, int]:
        """Return a sort key: requests whose prompts have begun first, and among equals the lowest `rank` first."""
        return not request.has_begun, *request.rank

    def chunks(self, requests: Iterable[Request]) -> Iterator[PrefillChunk]:
        """Yield the next chunk of each request until the step's token budget is used up.

        A chunk has up to `prefill_chunk_size` tokens, but no more than are left of the budget.
        """
        size = self.config.prefill_chunk_size
        left = self.config.prefill_token_budget or size * self.config.max_batch_size  # a chunk for every seat
        for request in requests:
            start = request.prefill_progress
            tokens = min(size, left, len(request.token_ids) - start)
            yield PrefillChunk(request, start, start + tokens)
            left -= tokens
            if left == 0:
                return
