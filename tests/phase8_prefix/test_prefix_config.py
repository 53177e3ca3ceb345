"""What may be asked for together, and what is made of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

import phase8_prefix.scheduler
from phase5_continuous.cache import SlottedKVCache
from phase6_paged.cache import PagedKVCachePool
from phase6_paged.scheduler import PagedScheduler
from phase7_chunked.scheduler import ChunkedScheduler
from phase8_prefix import Config, Scheduler
from phase8_prefix.cache import PrefixCachingPool
from tests.engine_helpers import add, build, greedy, run
from tests.phase6_paged.support import assert_asks_no_pool


def test_sharing_is_the_default() -> None:
    config = Config()
    assert (config.enable_prefix_caching, config.kv_cache_backend, config.block_size) == (True, "paged", 16)


def test_slots_cannot_be_shared_and_the_reason_is_told() -> None:
    with pytest.raises(ValidationError) as caught:
        Config(kv_cache_backend="contiguous")
    (error,) = caught.value.errors()
    assert "kv_cache_backend contiguous has no blocks to share" in error["msg"]
    assert "turn enable_prefix_caching off" in error["msg"]
    Config(kv_cache_backend="contiguous", enable_prefix_caching=False)


def test_phase_7s_contradictions_are_still_refused() -> None:
    with pytest.raises(ValidationError, match="mixed_batches has no meaning without use_chunked_prefill"):
        Config(use_chunked_prefill=False, mixed_batches=False)


@pytest.mark.parametrize(
    ("options", "scheduler", "pool"),
    [
        ({}, Scheduler, PrefixCachingPool),
        ({"mixed_batches": False}, Scheduler, PrefixCachingPool),
        ({"use_chunked_prefill": False}, PagedScheduler, PrefixCachingPool),
        ({"enable_prefix_caching": False}, ChunkedScheduler, PagedKVCachePool),
        ({"enable_prefix_caching": False, "use_chunked_prefill": False}, PagedScheduler, PagedKVCachePool),
        (
            {"enable_prefix_caching": False, "kv_cache_backend": "contiguous"},
            ChunkedScheduler,
            SlottedKVCache,
        ),
    ],
)
def test_the_parts_that_options_choose(options: dict[str, Any], scheduler: type, pool: type) -> None:
    engine = build("phase8_prefix", **options)
    assert type(engine.scheduler) is scheduler
    assert type(engine.runner.pool) is pool


@pytest.mark.parametrize("options", [{}, {"mixed_batches": False}, {"use_chunked_prefill": False}], ids=str)
def test_every_kind_of_schedule_finds_what_is_there(options: dict[str, Any]) -> None:
    engine = build("phase8_prefix", block_size=4, **options)
    for expected in (0, 16):
        own = add(engine, [1] * 20, greedy(2))
        run(engine)
        assert own.cached_tokens == expected


@pytest.mark.parametrize("module", [phase8_prefix.scheduler], ids=lambda module: module.__name__)
def test_the_scheduler_does_not_ask_which_pool_it_is(module: ModuleType) -> None:
    assert_asks_no_pool(module)
