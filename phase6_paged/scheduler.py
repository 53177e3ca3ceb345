"""Admits by free memory, grows sequences block by block, and preempts when memory runs out.

```text
          free blocks                       a decode step needs a block and none is free:
  admit ──> prompt's blocks taken now       the last in line gives up all of its own,
  step  ──> one more where a block is full  goes to the front of the queue with what it has
  retire ─> all of them back                generated, and later prefills prompt + generated
```
"""

from __future__ import annotations

from common.kv import SchedulerPool
from common.request import Request
from phase5_continuous.scheduler import ContinuousScheduler
from phase6_paged.config import Config

GROWTH_RESERVE = 0.2  # share of free memory that admission leaves to the decoding sequences


class PagedScheduler(ContinuousScheduler):
    """Continuous batching that admits by free blocks. With phase 5's pool of slots, it behaves like phase 5."""

    config: Config

    def make_room(self, pool: SchedulerPool) -> list[Request]:
        """Reserve the column that this step computes for each decoding request. If memory is short, preempt
        the active request with the highest `rank`.

        Before that, seats are shared among groups, as in phase 5. The request with the lowest `rank` reserves
        first. Returns the preempted request in a list, or an empty list. The engine calls again until the list
        is empty.
        """
        if preempted := super().make_room(pool):
            return preempted
        for request in sorted(self.active, key=lambda r: r.rank):
            if request.wants_token and not pool.reserve(request, request.num_tokens):
                return self._make_way(max(self.active, key=lambda r: r.rank))
        return []

    def admit(self, pool: SchedulerPool) -> None:
        """Admit waiting requests in order while their prompt and generated tokens fit into free memory, less
        the share `GROWTH_RESERVE` of it. That share is left to the decoding requests. If there are no active
        requests, a request may use it, too."""
        free = pool.free_token_capacity()
        budget = float("inf") if free is None else free * (1 - GROWTH_RESERVE)
        while request := self.next_waiting():
            cost = pool.cost(request, len(request.token_ids))
            # With no active request, the reserve has no use: a prompt that fits the pool must not wait forever.
            if (cost > budget and self.active) or not self._seat(request, pool):
                return
            budget -= cost

    def _fits_instead(self, waiting: Request, active: Request, pool: SchedulerPool) -> bool:
        free = pool.free_token_capacity()
        if free is None:
            return True
        free += active.num_tokens + self.config.block_size  # an upper bound: shared blocks stay in use
        return pool.cost(waiting, len(waiting.token_ids)) <= free * (1 - GROWTH_RESERVE)
