"""Phase 5, continuous batching: admit and retire on every step, one cache slot per sequence."""

from __future__ import annotations

import functools

from common.build import EngineBuilder, RunnerFactory
from common.engine import Phase
from phase5_continuous.cache import SlottedKVCache
from phase5_continuous.config import Config
from phase5_continuous.runner import ContinuousRunner as Runner
from phase5_continuous.scheduler import ContinuousScheduler as Scheduler

__all__ = ["PHASE", "Config", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(
    number=5,
    slug="phase5_continuous",
    title="Continuous batching",
    idea="admit and retire on every step, one cache slot per sequence",
)


def make_runner(config: Config) -> RunnerFactory:
    return functools.partial(Runner, max_prefill_pass_tokens=config.max_prefill_pass_tokens)


build_engine: EngineBuilder[Config] = EngineBuilder(
    phase=PHASE,
    scheduler=Scheduler,
    runner=make_runner,
    pool=SlottedKVCache,
)
