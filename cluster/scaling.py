"""The number of replicas for a load. This module does not import Ray.

```text
target = 0.7      loads   1.0  1.0  0.4     sum 2.4     2.4 / 0.7 = 3.43     4 replicas
                  later   0.3  0.3  0.3  0.3    1.2     1.2 / 0.7 = 1.71     2 replicas
```

A load is `cluster.policy.Load`'s value: 1 is a full batch or full memory, and waiting requests add to it. New
replicas take over a share of the load, so the sum stays the same. The sum is divided by one replica's target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TARGET = 0.7  # load of one replica: the rest is for requests that come while another replica starts


def replicas_for(loads: Sequence[float], target: float = TARGET) -> int:
    """Return the smallest number of replicas, at least one, whose average load is at most `target`."""
    return max(math.ceil(round(sum(loads) / target, 6)), 1)
