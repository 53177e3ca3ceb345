"""Records or captures a stream's passes before the first request.

Made-up requests run through the runner's `execute`. Their memory is freed afterwards. If the scheduler decides by
the cost of a row of a pass (`RowCost`), this cost is measured, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from common.devices.graphs import Graphs
from common.devices.streams import CudaStream, Stream, TapeStream
from common.engine.runner import Runner
from common.engine.scheduling import PrefillChunk, RowCost, Scheduler, StepPlan
from common.request import Request, SamplingParams

logger = logging.getLogger(__name__)

TRIALS = 8  # runs of each measurement, of which the fastest counts
ROWS = 32  # `measure` times steps of one row and of this many


def warm_up(runner: Runner, scheduler: Scheduler) -> None:
    """Record or capture the common kinds of passes, if the runner's stream does either. Otherwise do nothing.

    Then measure the cost of a row (`RowCost`), if the scheduler decides by it.
    """
    stream = runner.stream
    if isinstance(stream, TapeStream):
        record(runner)
    elif isinstance(stream, CudaStream) and stream.graphs.sizes:
        capture(runner, stream.graphs)
    else:
        return
    if scheduler.row_cost is not None:
        scheduler.row_cost = measure(runner, stream) or scheduler.row_cost


def record(runner: Runner) -> None:
    """Record the common kinds of passes. `runner`: with nothing in flight."""
    logger.info("warming up")
    best, drawn, ordered = SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)
    for batch in ([best], [drawn], [ordered], [drawn, ordered]):
        _decode(runner, batch)
    runner.pool.clear()


def capture(runner: Runner, graphs: Graphs) -> None:
    """Capture the decode step on a GPU for every number of rows in `graphs` that the KV memory can hold.

    The largest comes first, so that each smaller graph finds its scratch memory in the pool. Each is captured three
    times: without searches, with searches for top-k and top-p (`kernels.draw`), and with searches and penalties
    (`kernels.penalties`). Graphs that were captured before are replaced, and failed captures are tried again.

    Args:
        runner: with nothing in flight.
        graphs: the graphs of the runner's stream.
    """
    started_s, before = time.perf_counter(), torch.cuda.memory_reserved(runner.model.device)
    graphs.clear()
    for size in reversed(graphs.sizes):
        for params in (
            SamplingParams(temperature=0.0),
            SamplingParams(top_p=0.9),
            SamplingParams(presence_penalty=1.0),
        ):
            _decode(runner, [params] * size, 1)
    runner.pool.clear()
    taken = torch.cuda.memory_reserved(runner.model.device) - before
    logger.info(
        "captured decode steps of %s sequences in %.1f s: %.0f MiB; failed: %d",
        ", ".join(map(str, graphs.sizes)),
        time.perf_counter() - started_s,
        taken / 2**20,
        len(graphs.failed),
    )


def measure(runner: Runner, stream: Stream) -> RowCost | None:
    """Time steps of one row and steps of `ROWS` rows, and return the fixed time of a step in units of a row's time.

    Both are steps of a single sequence, the first without guesses, the second with `ROWS - 1` guesses. Returns None
    if sequences cannot be that long, or if the KV memory is too small.

    Args:
        runner: the runner of a phase that verifies guesses, with nothing in flight.
        stream: the runner's stream.
    """
    stream.time_work(True)
    best: dict[int, tuple[float, float]] = {}  # by rows: seconds of a step, and of the host's work in it
    for rows in (1, ROWS):
        timed = []
        for _ in range(TRIALS):
            step_s = _decode(runner, [SamplingParams(temperature=0.0)], 1, guesses=rows - 1)
            pass_s = sum(ended - began for _, began, ended in stream.take_times()[-2:])  # with sampling
            timed.append((step_s, step_s - pass_s))
        best[rows] = min(timed)
    stream.time_work(False)
    runner.pool.clear()
    runner.telemetry.accepted_at.clear()
    (one_s, host_s), (many_s, _) = best.values()
    if not many_s:
        return None
    cost = RowCost.of(one_s, many_s, ROWS, host_s)
    row_s = one_s / (cost.weights + 1 + cost.host)
    logger.info("a pass of one row takes %.2f ms, and each row more %.2f ms", 1e3 * one_s, 1e3 * row_s)
    return cost


def _decode(runner: Runner, batch: Sequence[SamplingParams], tokens: int = 0, guesses: int = 0) -> float:
    """Compute a prompt of one token for each item of `batch`, then decode steps of these sequences.

    Args:
        runner: with nothing in flight.
        batch: the sampling parameters of each sequence.
        tokens: number of decode steps.
        guesses: number of guesses of each sequence in each decode step.

    Returns:
        The seconds of the last step. 0 if sequences cannot be that long, or if the KV memory is too small: then
        nothing is computed.
    """
    longest = runner.config.max_seq_len
    if longest is not None and 1 + tokens + guesses > longest:
        return 0.0
    requests = [Request(f"warm-up {i}", [0], params) for i, params in enumerate(batch)]
    step_s = 0.0
    if all(runner.pool.reserve(request, 1 + tokens + guesses) for request in requests):
        for request in requests:
            request.start_prefill()
        plans = [StepPlan(prefill=tuple(PrefillChunk.rest(request) for request in requests))]
        plans += [StepPlan(decode=tuple(requests), verifies=guesses > 0)] * tokens
        for plan in plans:
            for request in plan.decode:
                request.drafts.guess([0] * guesses)
            began_s = time.perf_counter()
            runner.execute(plan)
            while runner.in_flight:
                runner.execute(StepPlan())
            step_s = time.perf_counter() - began_s
    runner.release(requests)
    return step_s
