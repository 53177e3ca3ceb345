"""Records or captures the passes of a stream before the first client comes, and chooses its number of threads.

All of it by made-up requests, which go through the runner's `execute` and leave nothing behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from common.request import Request, SamplingParams
from common.runner import Runner
from common.scheduling import PrefillChunk, StepPlan
from common.streams import TapeStream, graph_sizes

logger = logging.getLogger(__name__)

TRIALS = 8
HOST_S = 3e-4  # about what the host needs for a step


def record(runner: Runner, stream: TapeStream, threads: int | None) -> None:
    """Record the common kinds of passes.

    Args:
        runner: with nothing in flight.
        stream: the runner's.
        threads: how many share a pass. None: time a pass with all threads and with one less, and choose.
    """
    logger.info("warming up")
    best, drawn, ordered = SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)
    for batch in ([best], [drawn], [ordered], [drawn, ordered]):
        _decode(runner, batch)
    most = torch.get_num_threads()
    if threads is None and most > 1:
        seconds: dict[int, float] = {}
        for count in (most - 1, most):
            stream.set_threads(count)
            stream.take_times()
            _decode(runner, [best], TRIALS)
            passes = stream.take_times()[2::2]  # without the prompt's, and between them choices of tokens
            seconds[count] = min((ended - began for _, began, ended in passes), default=0.0)
        # A thread that waits for its share of the next operator keeps a core busy. With as many as there are cores,
        # the next pass begins when the host rests; with one less, the two go on side by side.
        threads = most - (seconds[most - 1] < seconds[most] + HOST_S)
        logger.debug("%d threads a pass; seconds of one: %s", threads, seconds)
    stream.set_threads(threads or most)
    runner.pool.reset_prefix_cache()


def capture(runner: Runner) -> None:
    """Capture the decode step on a GPU in every size that a batch of this engine can need.

    A batch that fills all seats may be smaller than the graph that it needs; the graph's missing rows are copies.
    """
    started_s, before = time.perf_counter(), torch.cuda.memory_reserved(runner.model.device)
    seats = len(runner.pool.block_tables)
    sizes = graph_sizes(seats)
    for size in sizes:
        _decode(runner, [SamplingParams(temperature=0.0)] * min(size, seats), 1)
    runner.pool.reset_prefix_cache()
    taken = torch.cuda.memory_reserved(runner.model.device) - before
    seconds = time.perf_counter() - started_s
    logger.info("captured decode steps of %s sequences in %.1f s: %.0f MiB", sizes, seconds, taken / 2**20)


def _decode(runner: Runner, batch: Sequence[SamplingParams], tokens: int = 0) -> None:
    """Compute prompts of one token, then `tokens` tokens more, a step at a time; nothing if memory is too small."""
    requests = [Request(f"warm-up {i}", [0], params) for i, params in enumerate(batch)]
    if all(runner.pool.reserve(request, 1 + tokens) for request in requests):
        for request in requests:
            request.start_prefill()
        plans = [StepPlan(prefill=tuple(PrefillChunk.rest(request) for request in requests))]
        plans += [StepPlan(decode=tuple(requests))] * tokens
        for plan in plans:
            runner.execute(plan)
            while runner.in_flight:
                runner.execute(StepPlan())
    runner.release(requests)
