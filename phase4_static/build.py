"""The classes of phase 4, and what builds its engines."""

from __future__ import annotations

from common.startup.build import EngineBuilder
from phase4_static import PHASE
from phase4_static.cache import StaticKVCache as Pool
from phase4_static.config import Config
from phase4_static.runner import StaticRunner as Runner
from phase4_static.scheduler import StaticScheduler as Scheduler

__all__ = ["Pool", "Runner", "Scheduler", "build_engine"]

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, Pool)
