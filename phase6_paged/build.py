"""The classes of phase 6, and what builds its engines."""

from __future__ import annotations

from common.startup.build import EngineBuilder
from phase5_continuous.runner import ContinuousRunner as Runner
from phase6_paged import PHASE
from phase6_paged.cache import PagedKVCachePool as Pool
from phase6_paged.cache import open_pool
from phase6_paged.config import Config
from phase6_paged.scheduler import PagedScheduler as Scheduler

__all__ = ["Pool", "Runner", "Scheduler", "build_engine"]

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, open_pool)
