"""Phase 7's schedule, but the prefill of a prompt begins after the prefix that is in the cache already.

```text
a burst: A and B begin with the same 1008 tokens, and have 16 of their own         time ──>

  phase 7   A └ 256 ┘└ 256 ┘└ 256 ┘└ 256 ┘            phase 8   A └ 256 ┘└ 256 ┘└ 256 ┘└ 256 ┘
            B                            └ 256 …                B                            └ 16 ┘
```
"""

from __future__ import annotations

from collections.abc import Iterator

from common.kv import SchedulerPool
from common.request import Request
from phase7_chunked.scheduler import ChunkedScheduler
from phase8_prefix.config import Config


class PrefixScheduler(ChunkedScheduler):
    """Phase 7's scheduler. A request searches for hits again right before its first chunk is planned.

    Requests that arrive together find no hits at admission, because none of them has been computed then.
    Without `use_chunked_prefill`, there is no second search.
    """

    config: Config

    def admit(self, pool: SchedulerPool) -> None:
        super().admit(pool)
        # Without chunks, the step that admits a prompt computes all of it: there is no time for a second search.
        if self.config.enable_prefix_caching and self.config.use_chunked_prefill:
            # Goes through the requests as `plan` will. A hit leaves more budget, so later requests search, too.
            for _ in self.chunks(self._looked_up(pool)):
                pass

    def _looked_up(self, pool: SchedulerPool) -> Iterator[Request]:
        """Yield the requests whose prompts may advance in this step. If a request's prompt has not begun,
        search for its hits before."""
        for request in self.prefill_requests():
            if not request.has_begun:
                pool.match_prefix(request)
            yield request
