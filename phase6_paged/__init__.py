"""Phase 6, paged attention: KV memory in small blocks, allocated as sequences grow."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from common.build import EngineBuilder, RunnerFactory
from common.engine import Phase
from common.kv import KVPool, KVShape
from phase5_continuous.cache import SlottedKVCache
from phase6_paged.cache import PagedKVCachePool
from phase6_paged.config import Config
from phase6_paged.runner import PagedRunner as Runner
from phase6_paged.scheduler import PagedScheduler as Scheduler

if TYPE_CHECKING:  # a phase's first import is `common`, which must come before torch
    import torch

__all__ = ["PHASE", "Config", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(
    number=6,
    slug="phase6_paged",
    title="Paged attention",
    idea="KV memory in small blocks, allocated as sequences grow",
)


def make_pool(config: Config, shape: KVShape, device: torch.device) -> KVPool:
    """The pool that `kv_cache_backend` names; neither engine nor runner asks which it is."""
    backends = {"paged": PagedKVCachePool, "contiguous": SlottedKVCache}
    return backends[config.kv_cache_backend](config, shape, device)


def make_runner(config: Config) -> RunnerFactory:
    return functools.partial(Runner, max_prefill_pass_tokens=config.max_prefill_pass_tokens)


build_engine: EngineBuilder[Config] = EngineBuilder(
    phase=PHASE,
    scheduler=Scheduler,
    runner=make_runner,
    pool=make_pool,
)
