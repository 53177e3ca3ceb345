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
        most = config.max_prefill_chunks_per_step
        # Prompt tokens that a step has room for: without an end, every pending prompt gets its chunk.
        self.prefill_tokens = sys.maxsize if most is None else most * self.chunk_size

    def plan(self) -> StepPlan:
        """A token for everyone who decodes, and chunks of as many prompts as a step has room for."""
        return StepPlan(
            decode=tuple(r for r in self._active if r.state is RequestState.DECODE),
            prefill=tuple(self.chunks(self.prefill_requests())),
        )

    def prefill_requests(self) -> list[Request]:
        """Whose prompts advance, in this order: those that have begun, oldest first, then newcomers."""
        prefilling = [r for r in self._active if r.state is RequestState.PREFILL]
        return sorted(prefilling, key=lambda r: (r.prefill_progress == 0, r.arrival))

    def chunks(self, requests: Iterable[Request]) -> Iterator[PrefillChunk]:
        """The next chunk of each, until the tokens of `max_prefill_chunks_per_step` full ones are dealt out.

        Where a prompt has less left than a chunk, the next one gets the rest of the room, and is cut to it: fewer
        steps then carry the same prompts.
        """
        room = self.prefill_tokens
        for request in requests:
            if room == 0:
                return
            start = request.prefill_progress
            tokens = min(self.chunk_size, room, len(request.token_ids) - start)
            yield PrefillChunk(request, start, start + tokens)
            room -= tokens
