"""Phase 4, static batching: fixed batches, padded to a rectangle, run until their last request is done."""

from __future__ import annotations

from common.engine.engine import Phase
from common.startup.build import EngineBuilder
from phase4_static.cache import StaticKVCache as Pool
from phase4_static.config import Config
from phase4_static.runner import StaticRunner as Runner
from phase4_static.scheduler import StaticScheduler as Scheduler

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(4, "phase4_static", "Static batching", "fixed batches, padded to a rectangle")

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, Pool)
