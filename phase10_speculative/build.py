"""The classes of phase 10, and what builds its engines."""

from __future__ import annotations

from common.startup.build import EngineBuilder
from phase8_prefix.cache import PrefixCachingPool as Pool
from phase8_prefix.cache import open_pool
from phase10_speculative import PHASE
from phase10_speculative.config import Config
from phase10_speculative.runner import SpeculativeRunner as Runner
from phase10_speculative.scheduler import SpeculativeScheduler as Scheduler

__all__ = ["Pool", "Runner", "Scheduler", "build_engine"]

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, open_pool)
