"""Phase 7, chunked prefill: prompts prefilled in bounded chunks beside decode."""

from __future__ import annotations

import functools

from common.build import EngineBuilder, RunnerFactory
from common.engine import Clock, Phase
from phase6_paged import Runner as PagedRunner
from phase6_paged import Scheduler as PagedScheduler
from phase6_paged import build_engine as build_paged_engine
from phase7_chunked.config import Config
from phase7_chunked.runner import ChunkedRunner as Runner
from phase7_chunked.scheduler import ChunkedScheduler as Scheduler

__all__ = ["PHASE", "Config", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(
    number=7,
    slug="phase7_chunked",
    title="Chunked prefill",
    idea="prompts prefilled in bounded chunks beside decode",
)


def make_scheduler(config: Config, clock: Clock) -> PagedScheduler:
    return Scheduler(config, clock) if config.use_chunked_prefill else PagedScheduler(config, clock)


def make_runner(config: Config) -> RunnerFactory:
    mixed = config.use_chunked_prefill and config.mixed_batches
    runner = Runner if mixed else PagedRunner
    return functools.partial(runner, max_prefill_pass_tokens=config.max_prefill_pass_tokens)


build_engine: EngineBuilder[Config] = EngineBuilder(
    phase=PHASE,
    scheduler=make_scheduler,
    runner=make_runner,
    pool=build_paged_engine.pool,
)
