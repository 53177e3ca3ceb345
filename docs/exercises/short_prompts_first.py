"""Exercise: let short prompts overtake long ones."""

from __future__ import annotations

from common.request import Request
from phase7_chunked import Scheduler


class ShortPromptsFirst(Scheduler):
    """Phase 7, but the prompt with the fewest tokens left advances first; among equals, the oldest.

    `request.token_ids` is what has to be in the cache, `request.prefill_progress` how much of it is.
    """

    def prefill_priority(self, request: Request) -> tuple[int, int]:
        return super().prefill_priority(request)  # the request with the lowest key advances first
