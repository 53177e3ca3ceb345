"""Builds phase 10's engine, and measures what a row costs."""

from __future__ import annotations

import logging
import time
from typing import Any

from common.build import EngineBuilder
from common.engine import Engine
from common.request import Request, SamplingParams
from common.scheduling import PrefillChunk, StepPlan
from common.streams import CudaStream, TapeStream
from phase10_speculative.config import Config
from phase10_speculative.runner import SpeculativeRunner
from phase10_speculative.scheduler import SpeculativeScheduler
from phase10_speculative.yields import RowCost

logger = logging.getLogger(__name__)

TRIALS = 5
ROWS = 32  # of the wider of the two passes that are timed
MOST_WEIGHTS = 256.0  # in rows: more cannot be told from noise


class SpeculativeBuilder(EngineBuilder[Config]):
    """Gives the scheduler the cost of a row on this machine, if it decides by that."""

    def __call__(self, config: Config, **arguments: Any) -> Engine:
        engine = super().__call__(config, **arguments)
        runner, scheduler = engine.runner, engine.scheduler
        assert isinstance(runner, SpeculativeRunner)
        assert isinstance(scheduler, SpeculativeScheduler)
        recorded = isinstance(runner.stream, TapeStream | CudaStream) and config.captured_steps
        if config.draft_length and config.draft_rows is None and recorded:
            scheduler.cost = measure(runner) or scheduler.cost
        return engine


def measure(runner: SpeculativeRunner) -> RowCost | None:
    """Time verify passes of 1 and of `ROWS` rows. Returns None if the KV memory is too small for that."""
    runner.stream.time_work(True)
    steps: dict[int, float] = {}
    host_s = 0.0
    for rows in (1, ROWS):
        timed = [_time(runner, rows) for _ in range(TRIALS)]
        if None in timed:
            return None
        steps[rows], host_s = min(each for each in timed if each is not None)
    runner.stream.time_work(False)
    runner.pool.reset_prefix_cache()
    runner.telemetry.accepted_at.clear()
    one_s = steps[1]
    row_s = max((steps[ROWS] - one_s) / (ROWS - 1), one_s / MOST_WEIGHTS)
    cost = RowCost(weights=max(1.0, (one_s - host_s) / row_s - 1), host=host_s / row_s)
    logger.info(
        "a pass of one row takes %.2f ms, and each row more %.2f ms: guesses are computed where they pay",
        1e3 * one_s,
        1e3 * row_s,
    )
    return cost


def _time(runner: SpeculativeRunner, rows: int) -> tuple[float, float] | None:
    """Return the seconds of a verify step of `rows` rows, and how many of them are the host's."""
    request = Request("measured", [0], SamplingParams(temperature=0.0))
    try:
        if not runner.pool.reserve(request, 1 + rows):
            return None
        request.start_prefill()
        _run(runner, StepPlan(prefill=(PrefillChunk.rest(request),)))
        request.guess([0] * (rows - 1))
        runner.stream.take_times()
        began_s = time.perf_counter()
        _run(runner, StepPlan(decode=(request,)))
        step_s = time.perf_counter() - began_s
        return step_s, step_s - sum(ended - began for _, began, ended in runner.stream.take_times())
    finally:
        runner.release([request])


def _run(runner: SpeculativeRunner, plan: StepPlan) -> None:
    runner.execute(plan)
    runner.drain()
