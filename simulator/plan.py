"""`python -m simulator.plan`: simulates 1 to 1000 replicas under each routing policy, and times the router.

Tenants send requests at random times. All prompts of one tenant begin with the same text. The number of tenants
grows with the number of replicas. If each tenant's requests always go to the same replica, a replica's cache can
hold the texts of its tenants.

In virtual time a router's decision takes no time. The time of its decisions is measured separately, in real time on
this machine. That time gives the number of requests a second that one router can pass on.

```text
tokens/s, TTFT        virtual time: real schedulers and pools, prices of a measured machine
decisions/s           real time: the policy's own code, on the loads of all replicas
```
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.results import LOCAL, RESULTS
from benchmarks.tables import Cell, MeasuredTable
from common.startup.phases import find_phase
from simulator.arrivals import Arrival, Unlike
from simulator.cost import Cost
from simulator.engine import simulate_engine
from simulator.loop import run
from simulator.observers import Summary, Timelines
from simulator.prices import find_cost, load_fits, mode_of_config
from simulator.routing import POLICIES, Routed

NAME = "simulator_replicas"
PHASE, MODEL = 8, "dummy:llama-60m"
REPLICAS = (1, 4, 16, 64, 256, 1000)
REQUESTS = 24  # requests for each replica, on average
OPTIONS: dict[str, Any] = {"max_batch_size": 24, "num_blocks": 2048, "block_size": 16, "max_seq_len": 4096}

COLUMNS = [
    *("replicas", "policy", "requests", "requests/s sent", "output tokens/s", "TTFT p50, s", "TTFT p99, s"),
    *("prompt tokens found in cache", "a decision, µs", "decisions/s"),
]


#: Mean number of tenants for each replica; prompt tokens that all prompts of a tenant share; further prompt tokens
#: of each request; tokens that each request generates.
TENANTS, SHARED, OWN, NEW = 4, 1024, 64, 64


def arrivals(replicas: int, requests: int, rate: float) -> Iterator[Arrival]:
    """Yield a Poisson process of `rate` requests a second, each from a random tenant."""
    rng, write = random.Random(f"plan:{replicas}:0"), Unlike()
    texts = [write(rng, SHARED) for _ in range(TENANTS * replicas)]
    now = 0.0
    for index in range(requests):
        now += rng.expovariate(rate)
        yield Arrival(index, now, rng.choice(texts) + write(rng, OWN), NEW)


def capacity(cost: Cost) -> float:
    """Return the requests a second that one replica serves with full batches and no cache hits."""
    engine = simulate_engine(PHASE, cost, model=MODEL, **OPTIONS)
    count: int = 4 * OPTIONS["max_batch_size"]
    write = Unlike()
    crowd = [Arrival(index, 0.0, write(random.Random(), SHARED + OWN), NEW) for index in range(count)]
    return count / run(engine, crowd, Timelines())


def simulate(replicas: int, policy: str, requests: int, rate: float, cost: Cost) -> list[Cell]:
    """Simulate a number of replicas under a routing policy. Returns a row of the table.

    Args:
        requests: number of requests for each replica, on average.
        rate: requests a second for each replica, on average.
    """
    engines = [simulate_engine(PHASE, cost, model=MODEL, **OPTIONS) for _ in range(replicas)]
    route, seen = Routed(POLICIES[policy](seed=0)), Summary(engines)
    run(engines, arrivals(replicas, requests * replicas, rate * replicas), seen, route=route)
    metrics, server = seen.metrics(), seen.server_metrics()
    assert metrics.ttft_s is not None
    seconds = route.seconds / route.decisions if route.decisions else None
    return [
        replicas,
        policy,
        metrics.requests,
        rate * replicas,
        metrics.output_tokens_per_s,
        metrics.ttft_s.p50,
        metrics.ttft_s.p99,
        server.cached_share,
        None if seconds is None else seconds * 1e6,
        None if seconds is None else 1 / seconds,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulator.plan", description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS, help=f"({REPLICAS})")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"for each replica ({REQUESTS})")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder with prices ({RESULTS})")
    parser.add_argument("--out", type=Path, default=LOCAL, help=f"folder of results ({LOCAL})")
    options = parser.parse_args(arguments)
    mode = mode_of_config(find_phase(PHASE).Config(**OPTIONS))
    fit = find_cost(load_fits(options.results), MODEL, mode)
    rate = capacity(fit.cost)
    settings = [
        (count, policy)
        for count in options.replicas
        for policy in POLICIES
        if count > 1 or policy == "random"
    ]
    rows = [
        simulate(count, policy, options.requests, rate, fit.cost)
        for count, policy in track(settings, "simulating", transient=True)
    ]
    table = MeasuredTable(
        name=NAME,
        title="replicas of phase 8 behind a router, simulated",
        setup={
            "prices of": f"{MODEL} on {fit.group.machine}",
            "tenants a replica": str(TENANTS),
            "prompts of": f"{SHARED} shared tokens and {OWN} own",
            "new tokens": str(NEW),
            "sent to each replica on average": f"{rate:.2f} requests/s, what it can serve without a cache",
        },
        columns=COLUMNS,
        rows=rows,
    )
    table.publish(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
