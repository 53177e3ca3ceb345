"""The options that may be given together, and the pool that they choose."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from phase5_continuous.cache import SlottedKVCache
from phase6_paged.cache import PagedKVCachePool
from phase8_prefix import Config
from phase8_prefix.cache import PrefixCachingPool
from tests.support.engines import Variant


def test_slots_cannot_be_shared_and_the_reason_is_told() -> None:
    with pytest.raises(ValidationError) as caught:
        Config(kv_cache_backend="contiguous")
    (error,) = caught.value.errors()
    assert "kv_cache_backend contiguous has no blocks to share" in error["msg"]
    assert "turn enable_prefix_caching off" in error["msg"]


@pytest.mark.parametrize(
    ("options", "pool"),
    [
        ({}, PrefixCachingPool),
        ({"mixed_batches": False}, PrefixCachingPool),
        ({"use_chunked_prefill": False}, PrefixCachingPool),
        ({"enable_prefix_caching": False}, PagedKVCachePool),
        ({"enable_prefix_caching": False, "use_chunked_prefill": False}, PagedKVCachePool),
        ({"enable_prefix_caching": False, "kv_cache_backend": "contiguous"}, SlottedKVCache),
    ],
)
def test_the_pool_that_options_choose(options: dict[str, Any], pool: type) -> None:
    assert type(Variant("phase8_prefix").pool(**options)) is pool
