"""Solution: sort by what is left. A stream of short prompts keeps a long one waiting for as long as it lasts."""

from __future__ import annotations

from common.request import Request
from phase7_chunked import Scheduler


class ShortPromptsFirst(Scheduler):
    def prefill_priority(self, request: Request) -> tuple[int, int]:
        return len(request.token_ids) - request.prefill_progress, request.arrival
