"""Solution: two properties of the pool."""

from __future__ import annotations

from common.kv import KVPool


def empty_share(pool: KVPool) -> float:
    return 1 - pool.used_tokens / pool.reserved_tokens if pool.reserved_tokens else 0.0
