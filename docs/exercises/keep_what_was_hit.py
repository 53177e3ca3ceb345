"""Exercise: an eviction policy that a long prompt, sent once, cannot flush."""

from __future__ import annotations

from phase8_prefix.tree import PrefixTree


class KeepWhatWasHit(PrefixTree):
    """Phase 8's tree, but nodes that were never hit are evicted before any that was.

    `hold` is called with what a request found. `self._unused` has the nodes that nobody uses, in the order in which
    they are evicted; whatever you make of that order, a node must come after those below it.
    """

    def evict(self, count: int) -> list[int]:
        return super().evict(count)  # least recently used first
