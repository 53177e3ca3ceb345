"""Phase 8, prefix caching: requests with the same prefix share its blocks."""

from __future__ import annotations

from common.engine.engine import Phase
from common.startup.build import EngineBuilder
from phase7_chunked.runner import ChunkedRunner as Runner
from phase8_prefix.cache import PrefixCachingPool as Pool
from phase8_prefix.cache import open_pool
from phase8_prefix.config import Config
from phase8_prefix.scheduler import PrefixScheduler as Scheduler

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(8, "phase8_prefix", "Prefix caching", "share the blocks of a common prefix")

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, open_pool)
