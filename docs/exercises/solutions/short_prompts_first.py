"""Solution: sort by what is left. A stream of short prompts keeps a long one waiting for as long as it lasts."""

from __future__ import annotations

from common.request import Request
from phase7_chunked import Scheduler


class ShortPromptsFirst(Scheduler):
    def prefill_requests(self) -> list[Request]:
        return sorted(
            super().prefill_requests(), key=lambda r: (len(r.token_ids) - r.prefill_progress, r.arrival)
        )
