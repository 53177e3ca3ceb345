"""Long prompts a chunk at a time (Agrawal et al. 2023, Sarathi): nobody's next token waits for all of it.

```text
a prompt of 1000 arrives while A and B decode         steps ──>
  phase 6   A a a a ················ a a a             the prompt has a step to itself
            B b b b ················ b b b
            C       └ 1000 at once ┘ c c c
  phase 7   A a a a  a   a   a   a   a a a             each step is a little longer, none is long
            B b b b  b   b   b   b   b b b
            C       └256┘└256┘└256┘└232┘ c c
```
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

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

    def plan(self) -> StepPlan:
        """A token for everyone who decodes, and the next chunk of as many prompts as a step may advance."""
        return StepPlan(
            decode=tuple(r for r in self._active if r.state is RequestState.DECODE),
            prefill=tuple(self.next_chunk(r) for r in self.prefill_requests(self.max_chunks)),
        )

    def prefill_requests(self, max_chunks: int | None) -> list[Request]:
        """Whose prompts advance: those that have begun, oldest first, then newcomers, while there is room."""
        prefilling = [r for r in self._active if r.state is RequestState.PREFILL]
        prefilling.sort(key=lambda r: (r.prefill_progress == 0, r.arrival))
        return self.fitting(prefilling, max_chunks)

    def fitting(self, requests: Sequence[Request], max_chunks: int | None) -> list[Request]:
        """The first of `requests`, as many as have their next chunks within the tokens of `max_chunks` full ones.

        Short prompts share a chunk's room: one step each would leave most of it empty, and have them queue for
        nothing. Nobody overtakes: where one does not fit, those behind it wait, too.
        """
        room = math.inf if max_chunks is None else max_chunks * self.chunk_size
        chunks = map(self.next_chunk, requests)
        totals = accumulate(chunk.end - chunk.start for chunk in chunks)
        return [r for r, tokens in zip(requests, totals, strict=True) if tokens <= room]

    def next_chunk(self, request: Request) -> PrefillChunk:
        start = request.prefill_progress
        return PrefillChunk(request, start, min(start + self.chunk_size, len(request.token_ids)))
