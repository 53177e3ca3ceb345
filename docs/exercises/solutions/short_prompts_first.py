"""Solution: sort by what is left. A stream of short prompts keeps a long one waiting for as long as it lasts."""

from __future__ import annotations

from common.request import Request
from phase7_chunked import Scheduler


class ShortPromptsFirst(Scheduler):
    def prefill_requests(self, max_chunks: int | None) -> list[Request]:
        everybody = super().prefill_requests(None)
        left_first = sorted(everybody, key=lambda r: (len(r.token_ids) - r.prefill_progress, r.arrival))
        return left_first[:max_chunks]
