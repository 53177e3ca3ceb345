"""Exercise: batches of similar lengths."""

from __future__ import annotations

from common.kv import KVPool
from phase4_static import Scheduler


class SimilarLengths(Scheduler):
    """Phase 4, but a batch is made of whoever has waited longest and those whose prompts are nearest in length.

    `admit` of phase 4 takes the front of `self.waiting` when a batch is due, so it is enough to bring the right
    requests to the front first. Whoever has waited longest must stay first: nobody may starve.
    """

    def admit(self, pool: KVPool) -> None:
        super().admit(pool)  # bring the right requests to the front before this
