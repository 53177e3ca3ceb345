"""Solution: a stable sort of everyone but the first, by distance from the first."""

from __future__ import annotations

from collections import deque

from common.kv import KVPool
from phase4_static import Scheduler


class SimilarLengths(Scheduler):
    def admit(self, pool: KVPool) -> None:
        if self.waiting and not self.active:
            first = self.waiting[0].num_prompt_tokens
            # The first has distance 0 and Python's sort keeps the order of equals, so it stays where it is.
            self.waiting = deque(sorted(self.waiting, key=lambda r: abs(r.num_prompt_tokens - first)))
        super().admit(pool)
