"""The real schedulers and KV pools of every phase on a virtual clock: a million requests without a model.

```python
from simulator import Arrival, LinearCost, Timelines, run, simulate_engine

engine = simulate_engine("chunked", LinearCost(pass_base_s=0.01, token_s=1e-4), max_batch_size=4)
seen = Timelines()
run(engine, [Arrival(0, at_s=0.0, prompt=range(1000), new_tokens=20)], seen)
seen.requests[0].ttft_s, engine.telemetry.counters.steps
```
"""

from simulator.arrivals import Arrival, Unlike, arrivals_of
from simulator.clock import VirtualClock
from simulator.cost import ONE_SECOND_A_PASS, Cost, Device, LinearCost, RooflineCost, Work
from simulator.engine import simulate_engine
from simulator.loop import Observer, Route, Server, run
from simulator.observers import Summary, Timelines

__all__ = [
    "ONE_SECOND_A_PASS",
    "Arrival",
    "Cost",
    "Device",
    "LinearCost",
    "Observer",
    "RooflineCost",
    "Route",
    "Server",
    "Summary",
    "Timelines",
    "Unlike",
    "VirtualClock",
    "Work",
    "arrivals_of",
    "run",
    "simulate_engine",
]
