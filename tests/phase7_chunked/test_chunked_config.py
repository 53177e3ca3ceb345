"""What may be asked for together, and what is made of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

import phase7_chunked.runner
import phase7_chunked.scheduler
from phase5_continuous.cache import SlottedKVCache
from phase6_paged.cache import PagedKVCachePool
from phase7_chunked import Config
from tests.engine_helpers import build
from tests.phase6_paged.support import assert_asks_no_pool, the_refusal, trace


def test_defaults() -> None:
    config = Config()
    assert config.use_chunked_prefill
    assert (config.prefill_chunk_size, config.prefill_token_budget) == (256, 256)
    assert config.max_prefill_chunks_per_step is None
    assert config.mixed_batches
    assert config.kv_cache_backend == "paged"


def test_the_budget_is_a_chunk_unless_it_is_told() -> None:
    assert Config(prefill_chunk_size=512).prefill_token_budget == 512
    assert Config(prefill_chunk_size=512, prefill_token_budget=256).prefill_token_budget == 256
    assert Config(prefill_chunk_size=512, prefill_token_budget=None).prefill_token_budget is None


@pytest.mark.parametrize(
    "name", ["prefill_chunk_size", "max_prefill_chunks_per_step", "prefill_token_budget"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_at_least_one(name: str, value: int) -> None:
    with pytest.raises(ValidationError) as caught:
        Config(**{name: value})
    error = the_refusal(caught.value)
    assert caught.value.errors()[0] == error, "first, for those who say only that"
    assert (error["loc"], error["type"]) == ((name,), "greater_than_equal")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"use_chunked_prefill": False, "prefill_chunk_size": 128},
            "prefill_chunk_size has no meaning without use_chunked_prefill: leave one of them out",
        ),
        (
            {"use_chunked_prefill": False, "max_prefill_chunks_per_step": 2},
            "max_prefill_chunks_per_step has no meaning without use_chunked_prefill",
        ),
        (
            {"use_chunked_prefill": False, "prefill_token_budget": 512},
            "prefill_token_budget has no meaning without use_chunked_prefill",
        ),
        (
            {"use_chunked_prefill": False, "prefill_token_budget": None},
            "prefill_token_budget has no meaning without use_chunked_prefill",
        ),
        (
            {"use_chunked_prefill": False, "mixed_batches": False},
            "mixed_batches has no meaning without use_chunked_prefill",
        ),
    ],
)
def test_contradictions_refuse_to_start_with_the_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Config(**options)
    (error,) = caught.value.errors()
    assert reason in error["msg"]


@pytest.mark.parametrize(
    "options",
    [
        {"use_chunked_prefill": False},
        {"use_chunked_prefill": False, "max_prefill_pass_tokens": 1},
        {"prefill_token_budget": None, "prefill_chunk_size": 1, "mixed_batches": False},
        {"prefill_token_budget": 100, "prefill_chunk_size": 512, "max_prefill_chunks_per_step": 3},
        {"prefill_chunk_size": 100_000},  # longer than any prompt: a prompt is one chunk
        {"kv_cache_backend": "contiguous", "prefill_chunk_size": 7},
    ],
)
def test_what_goes_together_starts(options: dict[str, Any]) -> None:
    Config(**options)


@pytest.mark.parametrize(("backend", "pool"), [("paged", PagedKVCachePool), ("contiguous", SlottedKVCache)])
def test_the_pool_that_an_option_chooses(backend: str, pool: type) -> None:
    assert type(build("phase7_chunked", kv_cache_backend=backend).runner.pool) is pool


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pass_tokens", [8192, 20])
def test_without_chunks_it_computes_what_phase_6_computes(seed: int, pass_tokens: int) -> None:
    options: dict[str, Any] = {"max_prefill_pass_tokens": pass_tokens, "num_blocks": 12, "block_size": 8}
    calls, told = trace(build("phase6_paged", **options), seed)
    same_calls, same_told = trace(build("phase7_chunked", use_chunked_prefill=False, **options), seed)
    assert same_calls == calls
    assert same_told == told


@pytest.mark.parametrize(
    "module", [phase7_chunked.runner, phase7_chunked.scheduler], ids=lambda module: module.__name__
)
def test_runner_and_scheduler_do_not_ask_which_pool_it_is(module: ModuleType) -> None:
    assert_asks_no_pool(module)
