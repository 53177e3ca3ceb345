"""Phase 10, speculative decoding: guess the next tokens from the text so far, and verify them in one pass."""

from __future__ import annotations

from common.engine.engine import Phase
from common.startup.build import EngineBuilder
from phase8_prefix.cache import PrefixCachingPool as Pool
from phase8_prefix.cache import open_pool
from phase10_speculative.config import Config
from phase10_speculative.runner import SpeculativeRunner as Runner
from phase10_speculative.scheduler import SpeculativeScheduler as Scheduler

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(
    10, "phase10_speculative", "Speculative decoding", "guess the next tokens, and verify them in one pass"
)

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, open_pool)
