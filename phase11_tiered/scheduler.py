"""Phase 10's schedule. A prompt is not computed while blocks of its prefix are being read from the disk.

```text
step      t        t+1      t+2      t+3
A         a        a        a        a            decodes in each step
B         ·        ·        ·        └ 24 ┘b      has a seat; 976 of its 1000 prompt tokens are read meanwhile
```
"""

from __future__ import annotations

from common.kv import SchedulerPool
from phase10_speculative.scheduler import SpeculativeScheduler
from phase11_tiered.config import Config


class TieredScheduler(SpeculativeScheduler):
    """Phase 10's scheduler. In each step, requests get the blocks that were read for them (`Request.fetching`)."""

    config: Config

    def admit(self, pool: SchedulerPool) -> None:
        for request in self.active:
            if request.fetching:
                pool.match_prefix(request)
        super().admit(pool)
