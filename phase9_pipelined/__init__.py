"""Phase 9, pipelined decoding: the next step computes while the host reads the last one's tokens."""

from __future__ import annotations

from common.engine.engine import Phase
from common.startup.build import EngineBuilder
from phase8_prefix.cache import PrefixCachingPool as Pool
from phase8_prefix.cache import open_pool
from phase9_pipelined.config import Config
from phase9_pipelined.runner import PipelinedRunner as Runner
from phase9_pipelined.scheduler import PipelinedScheduler as Scheduler

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(
    9,
    "phase9_pipelined",
    "Pipelined decoding",
    "launch the next step before the previous step's tokens are read",
)

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, open_pool)
