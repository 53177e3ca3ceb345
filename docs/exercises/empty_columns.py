"""Exercise: how much of the reserved KV memory holds nothing?"""

from __future__ import annotations

from common.kv import KVPool


def empty_share(pool: KVPool) -> float:
    """The share of the reserved columns that hold no token, 0.0 to 1.0; 0.0 where nothing is reserved."""
    raise NotImplementedError("a pool says both numbers")
