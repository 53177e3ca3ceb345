"""Scale a workload's rates to the machine, so that the load is the same relative to its capacity.

The table's arrival rates (4, 6 and 8 requests a second) fit one speed of machine. On a slower one every server
drowns and all that is measured is the length of the queue; on a faster one every server idles and all of them look
alike. So before a comparison the machine is measured, and the rates are scaled:

```text
capacity  = requests a second that a full batch of this workload's average request gets through
reference = the capacity for which the table's rate is right  = table rate / load
factor    = capacity / reference                              (rates are multiplied by it)

so that     rate sent / capacity = load                       on every machine
```

**What is measured.** The first server of the comparison gets exactly as many *identical* requests as it computes
together, each of the workload's mean prompt and mean answer length, all at once; prompts differ, so no cache helps.
Equally long requests need no padding and leave no row idle, so phase 4 is measured without the losses that it is
there to show, and the number is the machine's and not the scheduler's: phase 5 would give the same one. The
workload's own lengths are used because the price of a prompt token against a new token is not the same on a CPU and
on a GPU. The faster of two rounds counts: other work on the machine can only slow one down. All servers of a
comparison then get the same factor.

**Which load is right** (`LOADS`) depends on what a workload is to show:

- `continuous_batching`: 1.1. Static batching loses about a third of its capacity to rows that are done (the longest
  of eight answers drawn from 64 to 256 has 235 tokens on average, the average one 160), and more to padding. At 1.1
  it is offered about half more than it can do and its queue grows, while continuous batching is just full. In a
  simulation of both schedulers the gap in TTFT is widest from 0.8 to 1.2 and the one in throughput from 1.0 on; at
  2 both drown, at 0.5 neither queues.
- `chunked_prefill`: 0.9. Long prompts must arrive while others decode, all the time, but no queue should grow: a
  stall is to come from a neighbour's prompt, not from waiting.
- `prefix_caching`: 1.4. Too much for a server that prefills the shared 1024 tokens again for everyone, and not for
  one that does not.

Workloads without a rate (bursts, one client) are the same everywhere and are not scaled.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.client import Endpoint
from benchmarks.loadgen import LoadPlan, run_load
from benchmarks.results import Calibration, LoadResult
from benchmarks.workloads import PlannedRequest, PromptWriter, Workload, identical_requests

#: Offered load for which a workload was made, relative to capacity: requests sent per request that could be served.
LOADS = {"continuous_batching": 1.1, "chunked_prefill": 0.9, "prefix_caching": 1.4}
DEFAULT_LOAD = 1.0

ROUNDS = 2
WARMUP_PROMPT, WARMUP_NEW = 64, 8


class CalibrationError(RuntimeError):
    """The server did not get through the calibration."""


def reference_capacity(workload: Workload, load: float | None = None) -> float | None:
    """Return the capacity in requests per second for which the table's rate was written; None: no rate."""
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
        workload: one with a rate, or any other (whose factor is 1, without measuring).
        endpoint: a running server.
        writer: makes the prompts.
        batch: sequences that the server computes together.
        measured_on: the server's label, for the report.
        load: instead of the workload's own.
        stall_timeout_s: give up when no token comes for so long.
        run: sends a plan; another one in tests.

    Raises:
        CalibrationError: a request failed.
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
    """Send a batch of average requests. Returns the seconds from the first one's sending to the last one's end."""
    requests = identical_requests(
        writer,
        count=batch,
        prompt_tokens=round(workload.mean_prompt_tokens),
        new_tokens=round(workload.new_tokens.mean),
        seed=f"calibration:{workload.name}:{index}",
    )
    result = run(
        LoadPlan(endpoint, requests, warmup=warmup_requests(writer), stall_timeout_s=stall_timeout_s)
    )
    errors = [record.error for record in result.requests if record.error is not None]
    if errors:
        raise CalibrationError(f"{len(errors)} of {batch} requests failed, first: {errors[0]}")
    sent = min(record.sent_s for record in result.requests if record.sent_s is not None)
    return max(record.finished_s for record in result.requests if record.finished_s is not None) - sent


def warmup_requests(writer: PromptWriter) -> list[PlannedRequest]:
    """Return the two requests that are sent before every run and not counted."""
    return identical_requests(
        writer, count=2, prompt_tokens=WARMUP_PROMPT, new_tokens=WARMUP_NEW, seed="warm-up"
    )


def fixed_factor(workload: Workload, rate: str) -> Calibration:
    """Return the calibration that `--rate table` or `--rate NUMBER` asks for.

    Raises:
        ValueError: neither of them.
    """
    if rate == "table" or workload.rate is None:
        return Calibration(mode="table", factor=1.0)
    factor = float(rate)
    if not 0 < factor < float("inf"):
        raise ValueError(f"--rate {rate}: a factor is a positive number")
    return Calibration(mode="given", factor=factor)
