"""Admission by memory, growth by the block, and preemption when memory runs out.

```text
          free blocks                       a decode step needs a block and none is free:
  admit ──> prompt's blocks taken now       the latest arrival gives up all of its own,
  step  ──> one more where a block is full  goes to the front of the queue with what it has
  retire ─> all of them back                generated, and later prefills prompt + generated
```
"""

from __future__ import annotations

from common.kv import KVPool
from common.request import Request
from phase5_continuous.scheduler import ContinuousScheduler

GROWTH_RESERVE = 0.2  # share of the free pool kept from newcomers, for those who decode to grow into


class PagedScheduler(ContinuousScheduler):
    """Continuous batching on a budget of blocks. On a pool without one (slots) it is phase 5's."""

    def make_room(self, pool: KVPool) -> None:
        """Oldest first, so that the oldest always goes on: whoever is in its way arrived later."""
        for request in sorted(self._active, key=lambda r: r.arrival):
            while request.wants_token and not pool.reserve(request, request.num_tokens):
                if not self._make_way(pool):
                    return

    def _make_way(self, pool: KVPool) -> bool:
        """Preempt the latest arrival; False: nobody can be, in this step."""
        self._preempt(max(self._active, key=lambda r: r.arrival), pool)
        return True

    def _preempt(self, request: Request, pool: KVPool) -> None:
        """Take back a request's memory; nothing else is lost, and its client sees only a pause."""
        self._active.remove(request)
        pool.release(request)
        request.preempt()
        self.waiting.appendleft(request)
        self.preemptions += 1

    def admit(self, pool: KVPool) -> None:
        """First come, first served, as long as whole blocks for prompt and generated tokens are within budget."""
        free = pool.free_token_capacity()
        budget = float("inf") if free is None else free * (1 - GROWTH_RESERVE)
        while self.waiting and self.free_seats > 0:
            request = self.waiting[0]
            cost = pool.cost(request, len(request.token_ids))
            # With nobody active nobody grows: a prompt that fits the pool must not wait forever.
            if (cost > budget and self._active) or not self._seat(request, pool):
                return
            self.waiting.popleft()
            budget -= cost
