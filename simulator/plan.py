"""`python -m simulator.plan`: from one replica to a thousand, by routing policy, and what the router costs.

Tenants send requests at random times; all prompts of one tenant begin with the same text. The more replicas, the
more tenants: a replica can hold the texts of its tenants if each tenant is always sent to the same replica.

In virtual time a router decides at once. What its decisions take is measured beside that: a policy is Python that
runs on this machine, and its time for each decision says how many requests one router can send on.

```text
tokens/s, TTFT        virtual time: real schedulers and pools, prices of a measured machine
decisions/s           real time: the policy's own code, on the loads of so many replicas
```
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.results import LOCAL, RESULTS
from benchmarks.tables import Cell, MeasuredTable
from common.phases import find_phase
from simulator.arrivals import Arrival, Unlike
from simulator.cost import Cost
from simulator.engine import simulate_engine
from simulator.loop import run
from simulator.observers import Summary
from simulator.prices import find_cost, load_fits, mode_of_config
from simulator.routing import POLICIES, Routed

NAME = "simulator_replicas"
PHASE, MODEL = 8, "dummy:llama-60m"
REPLICAS = (1, 4, 16, 64, 256, 1000)
REQUESTS = 24  # for each
OPTIONS: dict[str, Any] = {"max_batch_size": 24, "num_blocks": 2048, "block_size": 16, "max_seq_len": 4096}

COLUMNS = [
    *("replicas", "policy", "requests", "requests/s sent", "output tokens/s", "TTFT p50, s", "TTFT p99, s"),
    *("prompt tokens found in cache", "a decision, µs", "decisions/s"),
]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of all tenants.

    Attributes:
        tenants: for each replica.
        shared: tokens that all prompts of a tenant begin with.
        own: tokens of a prompt after that.
        new: tokens asked for.
        requests: for each replica.
        load: requests sent, by those that the replicas could serve if nothing was found in a cache.
    """

    tenants: int = 4
    shared: int = 1024
    own: int = 64
    new: int = 64
    requests: int = REQUESTS
    load: float = 1.0

    def arrivals(self, replicas: int, rate: float, seed: int) -> Iterator[Arrival]:
        """Yield a Poisson process of `rate` requests a second, each from a random tenant."""
        rng, write = random.Random(f"plan:{replicas}:{seed}"), Unlike()
        texts = [write(rng, self.shared) for _ in range(self.tenants * replicas)]
        now = 0.0
        for index in range(self.requests * replicas):
            now += rng.expovariate(rate)
            yield Arrival(index, now, rng.choice(texts) + write(rng, self.own), self.new)


def capacity(cost: Cost, traffic: Traffic) -> float:
    """Return the requests a second that one replica serves with full seats and no cache hits."""
    engine = simulate_engine(PHASE, cost, model=MODEL, **OPTIONS)
    count: int = 4 * OPTIONS["max_batch_size"]
    write = Unlike()
    prompts = [write(random.Random(), traffic.shared + traffic.own) for _ in range(count)]
    crowd = [Arrival(index, 0.0, prompt, traffic.new) for index, prompt in enumerate(prompts)]
    return count / run(engine, crowd, Summary())


def measure(replicas: int, policy: str, rate: float, cost: Cost, traffic: Traffic) -> list[Cell]:
    """Simulate one row of the table. `rate`: requests a second for each replica on average."""
    engines = [simulate_engine(PHASE, cost, model=MODEL, **OPTIONS) for _ in range(replicas)]
    route, seen = Routed(POLICIES[policy](seed=0)), Summary()
    run(engines, traffic.arrivals(replicas, rate * replicas, seed=0), seen, route=route)
    metrics, server = seen.metrics(), seen.server_metrics(engines)
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
    traffic = Traffic(requests=options.requests)
    mode = mode_of_config(find_phase(PHASE).Config(**OPTIONS))
    fit = find_cost(load_fits(options.results), MODEL, mode, "")
    rate = traffic.load * capacity(fit.cost, traffic)
    settings = [
        (count, policy)
        for count in options.replicas
        for policy in POLICIES
        if count > 1 or policy == "random"
    ]
    rows = [
        measure(count, policy, rate, fit.cost, traffic)
        for count, policy in track(settings, "simulating", transient=True)
    ]
    table = MeasuredTable(
        name=NAME,
        title="replicas of phase 8 behind a router, simulated",
        setup={
            "prices of": f"{MODEL} on {fit.group.machine}",
            "tenants a replica": str(traffic.tenants),
            "prompts of": f"{traffic.shared} shared tokens and {traffic.own} own",
            "new tokens": str(traffic.new),
            "sent to each replica on average": f"{rate:.2f} requests/s, what it can serve without a cache",
        },
        columns=COLUMNS,
        rows=rows,
    )
    console = Console()
    table.print(console)
    console.print(f"written: {table.save(options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
