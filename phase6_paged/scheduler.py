"""Admission by memory, growth by the block, and preemption when memory runs out.

```text
          free blocks                       a decode step needs a block and none is free:
  admit ──> prompt's blocks taken now       the latest arrival gives up all of its own,
  step  ──> one more where a block is full  goes to the front of the queue with what it has
  retire ─> all of them back                generated, and later prefills prompt + generated
```
"""

from __future__ import annotations

from common.kv import SchedulerPool
from common.request import Request
from phase5_continuous.scheduler import ContinuousScheduler

GROWTH_RESERVE = 0.2  # share of the free pool kept from newcomers, for those who decode to grow into


class PagedScheduler(ContinuousScheduler):
    """Continuous batching on a budget of blocks. On a pool without one (slots) it is phase 5's."""

    def make_room(self, pool: SchedulerPool) -> list[Request]:
        """Reserve oldest first, so that the oldest request always goes on: it preempts later arrivals only."""
        for request in sorted(self.active, key=lambda r: r.arrival):
            if request.wants_token and not pool.reserve(request, request.num_tokens):
                return self._make_way()
        return []

    def _make_way(self) -> list[Request]:
        """Preempt the latest arrival and return it."""
        return [self._preempt(max(self.active, key=lambda r: r.arrival))]

    def _preempt(self, request: Request) -> Request:
        """Send a request back to the queue with the tokens it has generated; its client sees only a pause."""
        self.active.remove(request)
        request.preempt()
        self.waiting.appendleft(request)
        self.preemptions += 1
        return request

    def admit(self, pool: SchedulerPool) -> None:
        """First come, first served, as long as whole blocks for prompt and generated tokens are within budget."""
        free = pool.free_token_capacity()
        budget = float("inf") if free is None else free * (1 - GROWTH_RESERVE)
        while request := self.next_waiting():
            cost = pool.cost(request, len(request.token_ids))
            # With nobody active nobody grows: a prompt that fits the pool must not wait forever.
            if (cost > budget and self.active) or not self._seat(request, pool):
                return
            self.waiting.popleft()
            budget -= cost
