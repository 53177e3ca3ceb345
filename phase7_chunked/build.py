"""The classes of phase 7, and what builds its engines."""

from __future__ import annotations

from common.startup.build import EngineBuilder
from phase6_paged.cache import PagedKVCachePool as Pool
from phase6_paged.cache import open_pool
from phase7_chunked import PHASE
from phase7_chunked.config import Config
from phase7_chunked.runner import ChunkedRunner as Runner
from phase7_chunked.scheduler import ChunkedScheduler as Scheduler

__all__ = ["Pool", "Runner", "Scheduler", "build_engine"]

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, open_pool)
