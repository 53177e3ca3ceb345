"""Phase 7, chunked prefill: prompts prefilled in bounded chunks beside decode."""

from __future__ import annotations

from common.engine.engine import Phase
from common.startup.build import EngineBuilder
from phase6_paged.cache import PagedKVCachePool as Pool
from phase6_paged.cache import open_pool
from phase7_chunked.config import Config
from phase7_chunked.runner import ChunkedRunner as Runner
from phase7_chunked.scheduler import ChunkedScheduler as Scheduler

__all__ = ["PHASE", "Config", "Pool", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(7, "phase7_chunked", "Chunked prefill", "prompts prefilled in bounded chunks beside decode")

build_engine = EngineBuilder(PHASE, Config, Scheduler, Runner, open_pool)
