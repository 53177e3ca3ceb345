"""`enable_prefix_caching = False` is phase 7: the same plans, the same passes, and phase 7's suite."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import phase8_prefix
import tests.phase7_chunked.test_chunked_config as phase7_config
import tests.phase7_chunked.test_chunked_failures as phase7_failures
import tests.phase7_chunked.test_chunked_runner as phase7_runner
import tests.phase7_chunked.test_chunked_scheduler as phase7_scheduler
from common.engine import Engine
from tests.engine_helpers import build
from tests.phase6_paged.support import collect
from tests.phase7_chunked.test_without_chunks import trace

MODULES = (phase7_config, phase7_failures, phase7_runner, phase7_scheduler)

# Each test keeps its marks and fixtures, and finds phase 8's parts where its module had imported phase 7's.
globals().update(collect(*MODULES))


@pytest.fixture(autouse=True)
def without_caching(monkeypatch: pytest.MonkeyPatch) -> None:
    config = functools.partial(phase8_prefix.Config, enable_prefix_caching=False)

    def build_without_caching(phase: str, *args: Any, **options: Any) -> Engine:
        if phase != "phase7_chunked":  # what a test compares with
            return build(phase, *args, **options)
        return build("phase8_prefix", *args, enable_prefix_caching=False, **options)

    for module in MODULES:
        monkeypatch.setattr(module, "build", build_without_caching, raising=False)
        if hasattr(module, "Config"):
            monkeypatch.setattr(module, "Config", config)


def test_the_suite_is_here() -> None:
    collected = [name for name in globals() if "__" in name and name.startswith("test_")]
    assert len(collected) > 40


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "num_blocks": 200, "prefill_chunk_size": 8},
        {"block_size": 2, "num_blocks": 34, "prefill_chunk_size": 5},
        {"block_size": 4, "num_blocks": 40, "prefill_token_budget": None, "mixed_batches": False},
        {"kv_cache_backend": "contiguous", "prefill_chunk_size": 7},
        {"use_chunked_prefill": False, "block_size": 4},
    ],
    ids=["ample", "tight", "apart", "contiguous", "without-chunks"],
)
def test_plans_and_passes_are_phase_7s(options: dict[str, Any], seed: int) -> None:
    seven = build("phase7_chunked", **options)
    eight = build("phase8_prefix", enable_prefix_caching=False, **options)
    expected = trace(seven, seed)
    assert trace(eight, seed) == expected
    assert eight.scheduler.preemptions == seven.scheduler.preemptions
    assert eight.telemetry.counters.cached_tokens == 0
    assert len(expected[1]) > 150


@pytest.mark.parametrize("seed", range(2))
def test_with_caching_the_trace_is_another(seed: int) -> None:
    """Or the test above would prove nothing: prompts are one token, many times, and begin alike now and then."""
    options: dict[str, Any] = {"block_size": 2, "prefill_chunk_size": 8}
    plans, *_ = trace(build("phase7_chunked", **options), seed)
    sharing = build("phase8_prefix", **options)
    assert trace(sharing, seed)[0] != plans
    assert sharing.telemetry.counters.cached_tokens > 0
