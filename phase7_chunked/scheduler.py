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

from collections.abc import Iterable, Iterator

from common.request import Request, RequestState
from common.scheduling import PrefillChunk, StepPlan
from phase6_paged.scheduler import PagedScheduler
from phase7_chunked.config import Config


class ChunkedScheduler(PagedScheduler):
    """Phase 6's admission, which reserves a whole prompt's blocks; then the prompt advances chunk by chunk."""

    config: Config

    def plan(self) -> StepPlan:
        """A token for everyone who decodes, and a chunk of each prompt that a step has room for."""
        if not self.config.use_chunked_prefill:
            return super().plan()
        return StepPlan(
            decode=tuple(r for r in self.active if r.wants_token),
            prefill=tuple(self.chunks(self.prefill_requests())),
        )

    def prefill_requests(self) -> list[Request]:
        """Return the requests whose prompts may advance in this step, in the order of `prefill_priority`."""
        prefilling = [r for r in self.active if r.state is RequestState.PREFILL]
        return sorted(prefilling, key=self.prefill_priority)[: self.config.max_prefill_chunks_per_step]

    def prefill_priority(self, request: Request) -> tuple[int, int]:
        """Return a sort key: prompts that have begun go first, and among equals the oldest."""
        return not request.has_begun, request.arrival

    def chunks(self, requests: Iterable[Request]) -> Iterator[PrefillChunk]:
        """The next chunk of each, until the tokens of the budget are dealt out.

        The last one to get some is cut to what is left: fewer steps then carry the same prompts.
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
