"""Phase 5, continuous batching: admit and retire on every step, one cache slot per sequence."""

from __future__ import annotations

from common.engine.engine import Phase
from common.startup.build import EngineBuilder
from phase5_continuous.cache import SlottedKVCache as Pool
from phase5_continuous.config import Config
from phase5_continuous.runner import ContinuousRunner as Runner
from phase5_continuous.scheduler import ContinuousScheduler as Scheduler

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(
    5,
    "phase5_continuous",
    "Continuous batching",
    "admit and retire on every step, one cache slot per sequence",
)

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, Pool)
