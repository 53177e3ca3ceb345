"""The classes of phase 11, and what builds its engines."""

from __future__ import annotations

from common.startup.build import EngineBuilder
from phase11_tiered import PHASE
from phase11_tiered.cache import TieredPool as Pool
from phase11_tiered.cache import open_pool
from phase11_tiered.config import Config
from phase11_tiered.runner import TieredRunner as Runner
from phase11_tiered.scheduler import TieredScheduler as Scheduler

__all__ = ["Pool", "Runner", "Scheduler", "build_engine"]

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, open_pool)
