"""Phase 6, paged attention: KV memory in small blocks, allocated as sequences grow."""

from __future__ import annotations

from common.engine.engine import Phase
from common.startup.build import EngineBuilder
from phase5_continuous.runner import ContinuousRunner as Runner
from phase6_paged.cache import PagedKVCachePool as Pool
from phase6_paged.cache import open_pool
from phase6_paged.config import Config
from phase6_paged.scheduler import PagedScheduler as Scheduler

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(6, "phase6_paged", "Paged attention", "KV memory in small blocks, allocated as sequences grow")

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, open_pool)
