"""Phase 8, prefix caching: requests that begin alike share the blocks of what they have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.build import EngineBuilder
from common.engine import Clock, Phase
from common.kv import KVPool, KVShape
from common.scheduling import Scheduler as AnyScheduler
from phase7_chunked import Runner
from phase7_chunked import build_engine as build_chunked_engine
from phase8_prefix.cache import PrefixCachingPool
from phase8_prefix.config import Config
from phase8_prefix.scheduler import PrefixScheduler as Scheduler

if TYPE_CHECKING:  # a phase's first import is `common`, which must come before torch
    import torch

__all__ = ["PHASE", "Config", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(
    number=8,
    slug="phase8_prefix",
    title="Prefix caching",
    idea="share the blocks of a common prefix",
)


def make_scheduler(config: Config, clock: Clock) -> AnyScheduler:
    # Without chunks a prompt is computed in the step that admits it: there is no second look to take.
    caching = config.enable_prefix_caching and config.use_chunked_prefill
    return (Scheduler if caching else build_chunked_engine.scheduler)(config, clock)


def make_pool(config: Config, shape: KVShape, device: torch.device) -> KVPool:
    pool = PrefixCachingPool if config.enable_prefix_caching else build_chunked_engine.pool
    return pool(config, shape, device)


build_engine: EngineBuilder[Config] = EngineBuilder(
    phase=PHASE,
    scheduler=make_scheduler,
    runner=build_chunked_engine.runner,
    pool=make_pool,
)
