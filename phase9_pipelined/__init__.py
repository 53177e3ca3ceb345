"""Phase 9, pipelined decoding: the next step computes while the host reads the last one's tokens."""

from __future__ import annotations

import functools

from common.build import EngineBuilder, RunnerFactory
from common.engine import Phase
from phase8_prefix import build_engine as build_prefix_engine
from phase9_pipelined.config import Config
from phase9_pipelined.runner import PipelinedRunner as Runner
from phase9_pipelined.scheduler import PipelinedScheduler as Scheduler

__all__ = ["PHASE", "Config", "Runner", "Scheduler", "build_engine"]

PHASE = Phase(
    number=9,
    slug="phase9_pipelined",
    title="Pipelined decoding",
    idea="launch the next step before the last tokens are read",
)


def make_runner(config: Config) -> RunnerFactory:
    return functools.partial(
        Runner,
        max_prefill_pass_tokens=config.max_prefill_pass_tokens,
        depth=config.pipeline_depth,
        mixed=config.use_chunked_prefill and config.mixed_batches,
        captured=config.captured_steps,
        threads=config.pass_threads,
    )


build_engine: EngineBuilder[Config] = EngineBuilder(
    phase=PHASE,
    scheduler=Scheduler,
    runner=make_runner,
    pool=build_prefix_engine.pool,
)
