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
        chunks = config.max_prefill_chunks_per_step
        self.room = sys.maxsize if chunks is None else chunks * self.chunk_size

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

        Whoever has less left than a chunk leaves the rest to the next one, whose own chunk may be cut for it: a
        step whose room is half empty would cost nearly the same.
        """
        room = self.room
        for request in requests:
            start = request.prefill_progress
            tokens = min(self.chunk_size, room, len(request.token_ids) - start)
            if tokens == 0:
                return
            yield PrefillChunk(request, start, start + tokens)
            room -= tokens
