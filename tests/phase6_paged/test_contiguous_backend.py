"""`kv_cache_backend = contiguous` is phase 5: its whole suite runs here, and traces are equal step by step."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import phase6_paged
import tests.phase5_continuous.test_continuous_cache as phase5_cache
import tests.phase5_continuous.test_continuous_runner as phase5_runner
import tests.phase5_continuous.test_continuous_scheduler as phase5_scheduler
from common.engine import Engine
from tests.engine_helpers import build
from tests.phase6_paged.support import collect, trace

# Each test keeps its marks and fixtures, and finds phase 6's parts where its module had imported phase 5's.
globals().update(collect(phase5_cache, phase5_runner, phase5_scheduler))


@pytest.fixture(autouse=True)
def contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    config = functools.partial(phase6_paged.Config, kv_cache_backend="contiguous")

    def build_contiguous(phase: str, *args: Any, **options: Any) -> Engine:
        assert phase == "continuous"
        return build("phase6_paged", *args, kv_cache_backend="contiguous", **options)

    for module in (phase5_cache, phase5_runner, phase5_scheduler):
        for name, part in (
            ("build", build_contiguous),
            ("Config", config),
            ("Scheduler", phase6_paged.Scheduler),
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, part)


def test_the_suite_is_here() -> None:
    collected = [name for name in globals() if name.startswith("test_continuous_")]
    assert len(collected) > 25


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pass_tokens", [8192, 20])
def test_the_trace_is_phase_5s(seed: int, pass_tokens: int) -> None:
    calls, told = trace(build("continuous", max_prefill_pass_tokens=pass_tokens), seed)
    same_calls, same_told = trace(
        build("phase6_paged", kv_cache_backend="contiguous", max_prefill_pass_tokens=pass_tokens), seed
    )
    assert same_calls == calls
    assert same_told == told
    assert len(calls) > 120
