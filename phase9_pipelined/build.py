"""The classes of phase 9, and what builds its engines."""

from __future__ import annotations

from common.startup.build import EngineBuilder
from phase8_prefix.cache import PrefixCachingPool as Pool
from phase8_prefix.cache import open_pool
from phase9_pipelined import PHASE
from phase9_pipelined.config import Config
from phase9_pipelined.runner import PipelinedRunner as Runner
from phase9_pipelined.scheduler import PipelinedScheduler as Scheduler

__all__ = ["Pool", "Runner", "Scheduler", "build_engine"]

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, open_pool)
