"""The classes of phase 8, and what builds its engines."""

from __future__ import annotations

from common.startup.build import EngineBuilder
from phase7_chunked.runner import ChunkedRunner as Runner
from phase8_prefix import PHASE
from phase8_prefix.cache import PrefixCachingPool as Pool
from phase8_prefix.cache import open_pool
from phase8_prefix.config import Config
from phase8_prefix.scheduler import PrefixScheduler as Scheduler

__all__ = ["Pool", "Runner", "Scheduler", "build_engine"]

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, open_pool)
