"""The number of replicas for a load. This module does not import Ray.

```text
target = 0.7      loads   1.0  1.0  0.4     sum 2.4     2.4 / 0.7 = 3.43     4 replicas
                  later   0.3  0.3  0.3  0.3    1.2     1.2 / 0.7 = 1.71     2 replicas
```

A load is `cluster.policy.Load`'s value: 1 is a full batch or full memory, and what waits comes on top. Replicas
added take over a share of it; so the sum stays, and is divided by what one replica is meant to carry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TARGET = 0.7  # of one replica: the rest is for what comes while another is being started


def replicas_for(loads: Sequence[float], target: float = TARGET) -> int:
    """Return the smallest number of replicas, at least one, whose average load is at most `target`."""
    return max(math.ceil(round(sum(loads) / target, 6)), 1)
