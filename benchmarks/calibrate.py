"""Scale a workload's arrival rates to the machine, so that load divided by capacity is the same on every machine.

The rates in `workloads.toml` fit machines of one speed. On a slower machine every server is overloaded, and only
the length of the queue is measured. On a faster machine every server idles, and all look alike. So the machine's
capacity is measured before a comparison:

```text
capacity  = requests a second that the server completes with a full batch of this workload's average request
reference = the capacity for which the table's rate is right  = table rate / load
factor    = capacity / reference                              (rates are multiplied by it)
```

The first server of the comparison gets one full batch of requests at once, all of the workload's mean lengths.
The texts differ, so no cache helps. Requests of equal length need no padding and leave no row idle, so even phase
4 loses nothing: the capacity is the machine's, not the scheduler's. The faster of two rounds counts, because
other programs can only slow a round down. Workloads without a rate (bursts, one client) are not scaled.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.client import Endpoint
from benchmarks.loadgen import LoadPlan, LoadResult, run_load
from benchmarks.results import Calibration
from benchmarks.workloads import PlannedRequest, PromptWriter, Workload, identical_requests

#: Offered load for which a workload was made: requests sent per request that could be served. At 1.1, a static
#: server, which loses a third of its capacity to ended rows, has a growing queue, and a continuous one is just
#: full. At 0.9 no queue grows, so that a stall comes from another request's prompt. At 1.4, only a server that
#: reuses the shared tokens is not overloaded.
LOADS = {
    "continuous_batching": 1.1,
    "chunked_prefill": 0.9,
    "prefix_caching": 1.4,
    "questions": 1.1,
    "long_documents": 0.9,
    "shared_document": 1.4,
}
DEFAULT_LOAD = 1.0

ROUNDS = 2
WARMUP_PROMPT, WARMUP_NEW = 64, 8


class CalibrationError(RuntimeError):
    """A request of the calibration, or the load generator, failed."""


def reference_capacity(workload: Workload, load: float | None = None) -> float | None:
    """Return the capacity, in requests per second, that the rate in `workloads.toml` assumes; None without a rate.

    Args:
        load: requests sent for each request that could be served; None: the workload's own load.
    """
    if workload.rate is None:
        return None
    return workload.rate / (LOADS.get(workload.name, DEFAULT_LOAD) if load is None else load)


def calibrate(
    workload: Workload,
    endpoint: Endpoint,
    writer: PromptWriter,
    *,
    batch: int,
    measured_on: str,
    load: float | None = None,
    stall_timeout_s: float = 120.0,
    run: Callable[[LoadPlan], LoadResult] = run_load,
) -> Calibration:
    """Measure a running server's capacity for a workload and derive the factor for its rates.

    Args:
        batch: sequences that the server computes together.
        measured_on: the server's label, for the report.
        load: the offered load, instead of the workload's own.
        run: the function that sends a plan's requests; tests pass a fake.

    Raises:
        CalibrationError: a request, or the load generator, failed.
    """
    reference = reference_capacity(workload, load)
    if reference is None:
        return Calibration(mode="auto", factor=1.0)
    rounds_s = []
    for index in range(ROUNDS):
        requests = identical_requests(
            writer,
            count=batch,
            prompt_tokens=round(workload.mean_prompt_tokens),
            new_tokens=round(workload.new_tokens.mean),
            seed=f"calibration:{workload.name}:{index}",
        )
        plan = LoadPlan(endpoint, requests, warmup=warmup_requests(writer), stall_timeout_s=stall_timeout_s)
        try:
            result = run(plan)
            result.raise_for_errors()
        except RuntimeError as error:
            raise CalibrationError(str(error)) from None
        rounds_s.append(result.duration_s)
    capacity = batch / min(rounds_s)
    return Calibration(
        mode="auto",
        factor=capacity / reference,
        capacity=capacity,
        reference=reference,
        batch=batch,
        rounds_s=rounds_s,
        measured_on=measured_on,
    )


def warmup_requests(writer: PromptWriter) -> list[PlannedRequest]:
    """Return the two requests that are sent before every run and not counted."""
    return identical_requests(
        writer, count=2, prompt_tokens=WARMUP_PROMPT, new_tokens=WARMUP_NEW, seed="warm-up"
    )


def fixed_factor(workload: Workload, rate: str) -> Calibration:
    """Return the calibration that `--rate table` (factor 1) or `--rate NUMBER` (that factor) asks for.

    A workload without a rate gets the factor 1.

    Raises:
        ValueError: the workload has a rate, and `rate` is neither `table` nor a positive number.
    """
    if rate == "table" or workload.rate is None:
        return Calibration(mode="table", factor=1.0)
    factor = float(rate)
    if not 0 < factor < float("inf"):
        raise ValueError(f"--rate {rate}: a factor is a positive number")
    return Calibration(mode="given", factor=factor)
