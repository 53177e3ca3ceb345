"""Phase 7's schedule, where prompts begin after what others have computed.

```text
a burst: A and B begin with the same 1008 tokens, and have 16 of their own         time ──>

  phase 7   A └ 256 ┘└ 256 ┘└ 256 ┘└ 256 ┘            phase 8   A └ 256 ┘└ 256 ┘└ 256 ┘└ 256 ┘
            B                            └ 256 …                B                            └ 16 ┘
```
"""

from __future__ import annotations

from common.kv import KVPool
from common.request import RequestState
from phase7_chunked.scheduler import ChunkedScheduler


class PrefixScheduler(ChunkedScheduler):
    """At their admission, those of a burst find nothing: they look again until their first chunk is planned."""

    def admit(self, pool: KVPool) -> None:
        super().admit(pool)
        for request in self._active:
            if request.state is RequestState.PREFILL and not request.has_begun:
                pool.match_prefix(request)
