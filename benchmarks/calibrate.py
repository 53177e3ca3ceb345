"""Scale a workload's arrival rates to the machine, so that load divided by capacity is the same on every machine.

The arrival rates in the table `workloads.toml` (4, 6 and 8 requests a second) fit machines of one speed. On a
slower machine, every server is overloaded, and only the length of the queue is measured. On a faster machine, every
server idles, and all servers look alike. So the machine's capacity is measured before a comparison, and the rates
are scaled:

```text
capacity  = requests a second that the server completes with a full batch of this workload's average request
reference = the capacity for which the table's rate is right  = table rate / load
factor    = capacity / reference                              (rates are multiplied by it)

so that     rate sent / capacity = load                       on every machine
```

**The measurement.** The first server of the comparison gets one full batch of requests at once. Each request has
the workload's mean prompt length and mean answer length. The texts differ, so no cache helps. Requests of equal
length need no padding and leave no row idle, so even phase 4 loses nothing. The capacity is therefore the
machine's, not the scheduler's, and phase 5 would give the same number. The workload's own lengths are used because
the cost of a prompt token relative to a new token differs between a CPU and a GPU. The faster of two rounds counts,
because other programs on the machine can only slow a round down. The factor of a workload is the same for all
servers of a comparison.

**The load** (`LOADS`) depends on the effect that a workload is meant to show:

- `continuous_batching`: 1.1. Static batching loses about a third of its capacity to rows whose answers have ended
  (the longest of eight answers drawn from 64 to 256 has 235 tokens on average, the average answer 160), and more to
  padding. At a load of 1.1, a static server gets about 1.5 times the requests that it can serve. Its queue grows,
  while a continuous server is just full. In a simulation of both schedulers, the difference in TTFT is largest at
  loads from 0.8 to 1.2, and the difference in throughput from 1.0 on. At a load of 2 both servers are overloaded.
  At 0.5 neither has a queue.
- `chunked_prefill`: 0.9. Long prompts must arrive while others decode, all the time, but no queue should grow: a
  stall should come from another request's prompt, not from waiting in the queue.
- `prefix_caching`: 1.4. A server that prefills the shared 1024 tokens for every request is overloaded; a server
  that reuses them is not.

Workloads without a rate (bursts, one client) are not scaled: they do not depend on the machine's speed.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.client import Endpoint
from benchmarks.loadgen import LoadPlan, run_load
from benchmarks.results import Calibration, LoadResult
from benchmarks.workloads import PlannedRequest, PromptWriter, Workload, identical_requests

#: Offered load for which a workload was made, relative to capacity: requests sent per request that could be served.
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
    """Measure a server's capacity for a workload and derive the factor for its rates.

    Args:
        workload: the workload; without a rate, its factor is 1 and nothing is measured.
        endpoint: a running server.
        writer: makes the prompts.
        batch: sequences that the server computes together.
        measured_on: the server's label, for the report.
        load: the offered load, instead of the workload's own.
        stall_timeout_s: give up if no token comes for this many seconds.
        run: the function that sends a plan's requests; tests pass a fake.

    Raises:
        CalibrationError: a request, or the load generator, failed.
    """
    reference = reference_capacity(workload, load)
    if reference is None:
        return Calibration(mode="auto", factor=1.0)
    rounds_s = [
        _one_round(workload, endpoint, writer, batch, index, stall_timeout_s, run) for index in range(ROUNDS)
    ]
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


def _one_round(
    workload: Workload,
    endpoint: Endpoint,
    writer: PromptWriter,
    batch: int,
    index: int,
    stall_timeout_s: float,
    run: Callable[[LoadPlan], LoadResult],
) -> float:
    """Send `batch` requests of mean length at once. Returns the seconds from the first request's sending to the end
    of the last answer."""
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
    return result.duration_s


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
