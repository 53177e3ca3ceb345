"""The classes of phase 5, and what builds its engines."""

from __future__ import annotations

from common.startup.build import EngineBuilder
from phase5_continuous import PHASE
from phase5_continuous.cache import SlottedKVCache as Pool
from phase5_continuous.config import Config
from phase5_continuous.runner import ContinuousRunner as Runner
from phase5_continuous.scheduler import ContinuousScheduler as Scheduler

__all__ = ["Pool", "Runner", "Scheduler", "build_engine"]

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, Pool)
