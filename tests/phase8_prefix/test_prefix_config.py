"""What may be asked for together, and what is made of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

import phase8_prefix.scheduler
from phase5_continuous.cache import SlottedKVCache
from phase6_paged.cache import PagedKVCachePool
from phase8_prefix import Config
from phase8_prefix.cache import PrefixCachingPool
from tests.engine_helpers import add, build, greedy, run
from tests.phase6_paged.support import assert_asks_no_pool, trace


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
    assert type(build("phase8_prefix", **options).runner.pool) is pool


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("chunked", [True, False])
def test_without_caching_it_computes_what_phase_7_computes(seed: int, chunked: bool) -> None:
    options: dict[str, Any] = {"use_chunked_prefill": chunked, "num_blocks": 12, "block_size": 8}
    calls, told = trace(build("phase7_chunked", **options), seed)
    same_calls, same_told = trace(build("phase8_prefix", enable_prefix_caching=False, **options), seed)
    assert same_calls == calls
    assert same_told == told


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
